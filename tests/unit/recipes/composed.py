"""Compose the configuration of a command, once for each choice of its groups."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

CONF = Path(__file__).parents[3] / "conf"


def composed(name: str, *overrides: str) -> DictConfig:
    """Return what `compose(name, overrides)` does. It takes 0.2 s, so values are set in a copy."""
    parsed = OverridesParser.create().parse_overrides([*overrides])
    config = copy.deepcopy(_chosen(name, *(x.input_line or "" for x in parsed if _is_choice(x))))
    for override in parsed:
        if not _is_choice(override):
            with open_dict(config) if override.is_add() or override.is_force_add() else nullcontext():
                OmegaConf.update(config, override.key_or_group, override.value())
    return config


def _is_choice(override: Override) -> bool:
    return (CONF / override.key_or_group / f"{override.value()}.yaml").is_file()


@cache
def _chosen(name: str, *choices: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, overrides=[*choices])
