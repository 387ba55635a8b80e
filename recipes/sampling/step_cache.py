"""Enable a step cache of diffusers on the transformers of a recipe, and count what it skips."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from hydra.utils import get_class, instantiate
from torch import nn

from lightning_cp.compat.diffusers_names import has_hook
from lightning_cp.engine.apply import installed_on
from lightning_cp.mesh.sample_groups import SampleGroups
from lightning_cp.pipelines.guidance.cfg_samples import cfg_rows

_TIMESTEP = "current_timestep_callback"


def enable_cache(settings: Any, transformers: Iterable[Any], timestep: Callable[[], float]) -> None:
    """Enable the cache that `settings` (a config of `conf/cache`) describes.

    Args: timestep: returns the timestep of the current step, 0 to 1000, for caches that ask for it.
    Raises: ValueError: a transformer cannot have a step cache, or none of its modules matches the settings.
    """
    takes = {field.name for field in fields(get_class(settings["_target_"]))}
    config = instantiate(settings, _convert_="all", **({_TIMESTEP: timestep} if _TIMESTEP in takes else {}))
    for transformer in transformers:
        kind = type(transformer).__name__
        if not hasattr(transformer, "enable_cache"):
            raise ValueError(f"cache: diffusers has no step caches for {kind}: leave cache out")
        transformer.enable_cache(config)
        if not any(has_hook(module, "cache") for module in transformer.modules()):
            raise ValueError(f"cache: no module of {kind} matches {type(config).__name__}: leave cache out")


def skipped_fraction(transformers: Iterable[nn.Module]) -> float:
    """Return the fraction of module calls that step caches skipped, of all calls of modules that they may skip."""
    states = [installed_on(module) for module in transformers]
    hooks = [watched for installed in states if installed is not None for watched in installed.caches.hooks]
    total = sum(watched.skipped + watched.computed for watched in hooks)
    return sum(watched.skipped for watched in hooks) / total if total else 0.0


@dataclass
class CachedSteps:
    """The steps of a checkpoint's model with a step cache; called around each of its forwards.

    Attributes:
        transformer: a context-parallel transformer.
        ranks: the CFG branches over which the samples of a batch are split.
        calls: number of forwards of one sample.
        time: time of the current forward, 1 (noise) to 0.
    """

    transformer: Any
    ranks: SampleGroups
    calls: int
    time: float = 1.0
    _call: int = 0

    @contextmanager
    def __call__(self, time: float) -> Iterator[None]:
        self.time = time
        at = {"step_index": self._call, "sigma": time, "num_inference_steps": self.calls}
        with cfg_rows(self.transformer, self.ranks), self.transformer.cache_context("cond_uncond", **at):
            yield
        self._call += 1
