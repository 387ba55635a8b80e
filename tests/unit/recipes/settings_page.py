"""Write docs/settings.md from the rules that check settings: `python -m tests.unit.recipes.settings_page`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_cp import ContextParallelConfig, parallelize_pipeline
from lightning_cp.finetune.settings import DataFolder, LoraSettings
from lightning_cp.recipes.runs import precompute
from lightning_cp.recipes.settings import finetune, table
from lightning_cp.recipes.settings.table import read, show
from lightning_cp.rules import Each, Either, Integer, Number, OneOf, Rule, rules_of
from lightning_cp.strategies.settings import StrategySettings
from tests.unit.recipes.composed import composed

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"
_RULES: dict[str, Rule] = {one.key: one.rule for one in (*table.SETTINGS, *finetune._SETTINGS)}
_DEGREES = dict.fromkeys(("ring", "ulysses", "ring_degree", "ulysses_degree"), Integer(1))  # "auto": recipes only
_LEFT_OUT = (
    "model.transformer.",
    "model.num_tokens",
    "data.dataset.",
    "strategy.mlp_tiles",
)  # of tiny models, or twice
_WORDS = {
    "lora.targets": "names, regex, null",
    "lora.ranks": "int ≥ 1 by name, null",
    "path": "folder, table",
    "name": "text, null",
    "sizes": "list of [h, w], null",
    "replace": "text by text",
}
_HEAD = """# Settings

The settings of recipes, strategies and configs, with their defaults and the values that their rules accept; `null` is
`None` in Python. An empty cell is a setting without a default, or without a rule of one value. `--help` of a command
describes its settings, [api.md](api.md) the arguments in Python. An invalid value is one error before ranks start; it
names the setting, its value and what is valid. So is a key that no file of a recipe has. The page is written by

    python -m tests.unit.recipes.settings_page

**A degree has two spellings**: `ring=2` and `ulysses=2` in recipes and strategies, `ring_degree=2` and
`ulysses_degree=2` in `ContextParallelConfig`, as in diffusers. They mean the same.
Some options of a group have other defaults: `lightning-cp train optim=lion --cfg job` shows those of a command.
"""


def page() -> str:
    """Return the page in Markdown."""
    found: set[str] = set()
    lora = {f"lora.{name}": rule for name, rule in rules_of(LoraSettings).items()}
    tuned = composed("train", "experiment=finetune_wan", "strategy=cp_fsdp")
    encoding = OmegaConf.load(PAGE.parents[1] / "conf" / "precompute" / "precompute.yaml")
    assert isinstance(encoding, DictConfig)
    prepared = {one.key: one.rule for one in precompute._SETTINGS}
    sections = {
        "`ContextParallelConfig`": _of_class(ContextParallelConfig),
        "Strategies": _of_class(StrategySettings),
        "`parallelize_pipeline`": _of_function(),
        "`recipes/train.py`": _of_recipe(composed("train", "strategy=cp_fsdp"), _RULES, found),
        "`recipes/train.py`: fine-tuning": _of_recipe(tuned, _RULES | lora, found, empty=LoraSettings()),
        "`recipes/sample.py`": _of_recipe(composed("sample"), _RULES, found),
        "`recipes/precompute.py`": _of_recipe(encoding, prepared, found),
        "An entry of `data.path`": [(name, "", rule) for name, rule in rules_of(DataFolder).items()],
        "Options of groups": [(key, "", rule) for key, rule in _RULES.items() if key not in found],
    }
    return _HEAD + "".join(f"\n## {name}\n\n{_table(rows)}" for name, rows in sections.items())


def _of_class(kind: Any) -> list[tuple[str, str, Rule | None]]:
    rules = _RULES | _DEGREES | rules_of(kind)
    return [(one.name, _python(one.default), rules.get(one.name)) for one in fields(kind)]


def _of_function() -> list[tuple[str, str, Rule | None]]:
    rules, arguments = _RULES | rules_of(StrategySettings), inspect.signature(parallelize_pipeline).parameters.values()
    return [(one.name, _python(one.default), rules.get(one.name)) for one in arguments if one.kind == one.KEYWORD_ONLY]


def _of_recipe(
    config: DictConfig, rules: dict[str, Rule], found: set[str], empty: Any = None
) -> list[tuple[str, str, Rule | None]]:
    """Rows of the settings that a command has, and no command before it."""
    rows: list[tuple[str, str, Rule | None]] = []
    for key, rule in rules.items():
        group, _, name = key.rpartition(".")
        value = getattr(empty, name) if group == "lora" and name in rules_of(LoraSettings) else _value(config, key)
        if key not in found and value is not MISSING:
            found.add(key)
            rows.append((key, "" if value == "???" else show(value), rule))
    return rows


def _value(config: DictConfig, key: str) -> Any:
    group, _, name = key.rpartition(".")
    parent = OmegaConf.select(config, group) if group else config
    if not OmegaConf.is_dict(parent) or name not in [*parent]:
        return MISSING
    return (
        "???" if OmegaConf.is_missing(parent, name) or OmegaConf.is_interpolation(parent, name) else read(config, key)
    )


def _python(value: Any) -> str:
    return "" if value is MISSING else repr(value).replace("'", '"')


def _table(rows: Iterable[tuple[str, str, Rule | None]]) -> str:
    kept = [row for row in rows if not row[0].startswith(_LEFT_OUT)]
    columns = 3 if any(default for _, default, _ in kept) else 2
    cells = [(f"`{key}`", default, _WORDS.get(key) or _valid(rule)) for key, default, rule in kept]
    lines = [("setting", "default", "valid"), ("---",) * 3, *cells]
    return "".join(f"| {' | '.join(line if columns == 3 else line[::2])} |\n" for line in lines)


def _valid(rule: Rule | None) -> str:
    """Describe the valid values in a few words."""
    if isinstance(rule, Integer):
        return f"{rule.minimum} to {rule.maximum}" if (rule.maximum or 1e9) < 1e9 else f"int ≥ {rule.minimum}"
    if isinstance(rule, Number):
        signs = {"≥": rule.minimum, ">": rule.above, "<": rule.below, "≤": rule.maximum}
        return " ".join(["number", *(f"{sign} {bound}" for sign, bound in signs.items() if bound is not None)])
    if isinstance(rule, OneOf):
        return ", ".join(map(show, rule.choices))
    if isinstance(rule, Either):
        return f"{_valid(rule.second)}, {_valid(rule.first)}"
    if isinstance(rule, Each):
        return f"{rule.count or 'list'} × {_valid(rule.rule)}"
    return rule.describe().removeprefix("a ") if rule else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
