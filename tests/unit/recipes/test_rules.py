"""Every setting of a recipe has a rule, or is listed here; a value that breaks a rule is one error that names it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_cp.finetune.settings import LoraSettings
from lightning_cp.recipes.runs import precompute
from lightning_cp.recipes.settings import finetune, table
from lightning_cp.recipes.settings.table import Setting, SettingsError, show
from lightning_cp.rules import Each, Either, Integer, Number, OneOf, Rule, rules_of
from tests.unit.recipes import settings_page
from tests.unit.recipes.composed import CONF

# Any text, or checked together with other settings: test_settings.py, test_finetune_settings.py and their siblings.
CHECKED_ELSEWHERE = """
cache.cache_identifiers call data.kind data.path data.sizes data.token_width degrees.by_tokens extra graphs
image logger.name logger.project logger.version lora lora_scale model.component model.transformer.freq_dim
model.transformer.joint_attention_dim model.transformer.num_single_layers
model.transformer.pooled_projection_dim model.transformer.text_dim negative_prompt objective.density
objective.sigma_range optim.adjust_lr_fn optim.d_coef optim.safeguard_warmup optim.use_bias_correction output
prompts sampling.at_start sampling.call sampling.fps sampling.prompts shard
shares strategy.data_parallel strategy.degrees strategy.grid strategy.kernel strategy.object strategy.ring
strategy.rotate_method strategy.shares strategy.ulysses transformer
"""
_GROUPS = ("cache", "data", "logger", "model", "optim", "sampling", "strategy")


def settings() -> list[Setting]:
    """Return the rules of all recipes."""
    lora = (Setting(f"lora.{name}", rule) for name, rule in rules_of(LoraSettings).items())
    return [*table.SETTINGS, *finetune._SETTINGS, *precompute._SETTINGS, *lora]


def wrong(rule: Rule) -> Iterator[Any]:
    """Yield values on the other side of each bound of a rule, and of other types."""
    if isinstance(rule, Either):
        yield from (x for one in (rule.first, rule.second) for x in wrong(one) if not rule.passes(x))
        return
    yield from (x for x in ("no such value", "", 3, {}) if not rule.passes(x))
    if isinstance(rule, Integer):
        yield from (rule.minimum - 1, rule.minimum + 0.5, True)
        yield from () if rule.maximum is None else [rule.maximum + 1]
    if isinstance(rule, Number):
        yield from (float("nan"), True)
        yield from (x - 1 for x in [rule.minimum] if x is not None)
        yield from (x for x in (rule.above, rule.below) if x is not None)
        yield from (x + 1 for x in [rule.maximum] if x is not None)
    if isinstance(rule, OneOf):
        yield from (int(x) for x in rule.choices if isinstance(x, bool))
    if isinstance(rule, Each):
        yield from ([], *([x] * (rule.count or 1) for x in wrong(rule.rule)))


def keys() -> set[str]:
    """Return the single values in the configuration files of train, sample and precompute."""
    files = [*CONF.glob("[ts]*.yaml"), *CONF.glob("precompute/*.yaml"), *CONF.glob("lightning_cp/*/*.yaml")]
    found = set()
    for path in [*files, *(file for group in _GROUPS for file in CONF.glob(f"{group}/*"))]:
        group = path.parent.name if path.parent.name in _GROUPS and "@package _global_" not in path.read_text() else ""
        found |= {*_leaves(OmegaConf.to_container(OmegaConf.load(path)), group)}
    return {key for key in found if not re.search(r"_target_|defaults|^hydra", key)}


def _leaves(value: Any, name: str) -> Iterator[str]:
    """Yield the dotted names of values that refer to no other one."""
    if isinstance(value, dict) and (value or not name):
        for key, x in value.items():
            yield from _leaves(x, f"{name}.{key}".lstrip("."))
    elif not str(value).startswith("${"):
        yield name


def test_what_breaks_a_rule_is_named_with_its_value_and_what_is_valid() -> None:
    for setting in settings():
        values = list(wrong(setting.rule))
        assert values, setting.key
        for value in values:
            config = OmegaConf.create({})
            OmegaConf.update(config, setting.key, value)
            valid = re.escape(f"{setting.key}={show(value)} is not valid: must be {setting.rule.describe()}")
            with pytest.raises(SettingsError, match=f"^{valid}$"):
                setting.check(config)


def test_every_setting_has_a_rule() -> None:
    """A rule that is removed is missing here."""
    known = {rule.key for rule in settings()}
    assert keys() - known == set(CHECKED_ELSEWHERE.split())
    assert known - keys() == {"run_dir", "model.transformer.in_channels"}  # a field of Hydra's, and a reference


def test_the_page_of_settings_is_true() -> None:
    assert settings_page.PAGE.read_text(encoding="utf-8") == settings_page.page(), settings_page.__doc__
