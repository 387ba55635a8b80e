"""Exact context-parallel training and sampling of diffusion transformers, as strategies for Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_cp._register import register_strategies
from lightning_cp.config import ContextParallelConfig, ParallelConfig

if TYPE_CHECKING:
    from lightning_cp.attention import context_parallel_attention
    from lightning_cp.attention.key_cache import KeyCache
    from lightning_cp.attention.sparse import SparseMask
    from lightning_cp.compat.diffusers_names import ContextParallelInput, ContextParallelOutput
    from lightning_cp.engine import apply_context_parallel, check_plan, remove_context_parallel
    from lightning_cp.engine.graphs import capture_forward
    from lightning_cp.engine.recompute import OffloadCheckpoint, save_attention, selective_checkpoint
    from lightning_cp.pipelines import parallelize_pipeline, unparallelize_pipeline

__all__ = [
    "ContextParallelConfig",
    "ContextParallelInput",
    "ContextParallelOutput",
    "KeyCache",
    "OffloadCheckpoint",
    "ParallelConfig",
    "SparseMask",
    "apply_context_parallel",
    "capture_forward",
    "check_plan",
    "context_parallel_attention",
    "parallelize_pipeline",
    "remove_context_parallel",
    "save_attention",
    "selective_checkpoint",
    "unparallelize_pipeline",
]

# Imported at first use: torch, lightning and diffusers take seconds to import, and settings are checked first.
_HOMES = {
    "ContextParallelInput": "lightning_cp.compat.diffusers_names",
    "ContextParallelOutput": "lightning_cp.compat.diffusers_names",
    "KeyCache": "lightning_cp.attention.key_cache",
    "SparseMask": "lightning_cp.attention.sparse",
    "context_parallel_attention": "lightning_cp.attention",
    "OffloadCheckpoint": "lightning_cp.engine.recompute",
    "apply_context_parallel": "lightning_cp.engine",
    "capture_forward": "lightning_cp.engine.graphs",
    "check_plan": "lightning_cp.engine",
    "parallelize_pipeline": "lightning_cp.pipelines",
    "remove_context_parallel": "lightning_cp.engine",
    "save_attention": "lightning_cp.engine.recompute",
    "selective_checkpoint": "lightning_cp.engine.recompute",
    "unparallelize_pipeline": "lightning_cp.pipelines",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("lightning-cp")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


register_strategies()
