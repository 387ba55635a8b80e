"""Check how samples of several sizes are batched: `data.mixed` and `degrees`. Imports no torch."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_cp.mesh.degrees import check_degrees
from lightning_cp.recipes.settings.table import Setting, SettingsError, read
from lightning_cp.recipes.settings.world import is_single
from lightning_cp.rules import OneOf

_SETTINGS = (
    Setting("data.mixed", OneOf((True, False))),
    Setting("objective.reduction", OneOf(("samples", "tokens"))),
)


def check_mixture(config: DictConfig, *, data_parallel: int) -> None:
    """Check the batches of a fine-tuning run. Raises: SettingsError: the first error found."""
    for setting in _SETTINGS:
        setting.check(config)
    batch, by_tokens = read(config, "batch_size"), _by_tokens(config)
    if not by_tokens and not read(config, "data.mixed"):
        if batch % data_parallel:
            raise SettingsError(
                f"batch_size={batch} is the global batch and must be a multiple of {data_parallel} groups"
            )
        return
    ranks = data_parallel * read(config, "ring") * read(config, "ulysses")
    groups = max(data_parallel, ranks // min(by_tokens.values(), default=ranks))
    if batch < groups:
        raise SettingsError(
            f"batch_size={batch} is the global batch and must be at least {groups}, the largest number of data groups"
        )


def check_no_degrees(config: DictConfig) -> None:
    """Check a run that is no fine-tuning. Raises: SettingsError: it has degrees."""
    if _by_tokens(config):
        raise SettingsError("degrees.by_tokens needs model=pretrained: other data have samples of one size")


def _by_tokens(config: DictConfig) -> dict[int, int]:
    """Return `degrees.by_tokens`; empty without it. Raises: SettingsError: it is not valid."""
    value = read(config, "degrees.by_tokens")
    if value is None:
        return {}
    plain: Any = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    try:
        check_degrees(
            plain, ring=read(config, "ring"), ulysses=read(config, "ulysses"), shares=read(config, "shares", None)
        )
    except (TypeError, ValueError) as error:
        raise SettingsError(str(error).replace("degrees", "degrees.by_tokens", 1)) from None
    if is_single(config) and plain:
        raise SettingsError("degrees.by_tokens needs context parallelism: use strategy=cp or strategy=cp_fsdp")
    return dict(plain)
