"""diffusers' step caches as data: how each decides whether to compute, and what its state belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Cache:
    """One of diffusers' caches.

    Attributes:
        name: name of the cache, for errors.
        decides_by: "tokens": by sums over tokens, which are reduced over ranks. "latents": by the model's whole input,
            for which the first rank decides. "step": by step counters or timesteps, equal on all ranks. "text": it
            skips no attention, and only decides whether the text was projected before.
        per_context: True if its state is kept for each `cache_context`, False if all branches of guidance share it.
        needs_both_branches: True if it reads the conditional and unconditional rows of one batch.
    """

    name: str
    decides_by: Literal["tokens", "latents", "step", "text"]
    per_context: bool = True
    needs_both_branches: bool = False


# Module of diffusers.hooks -> the cache that it defines.
CACHES = {
    "first_block_cache": Cache("FirstBlockCache", "tokens"),
    "mag_cache": Cache("MagCache", "step"),  # its calibration averages over tokens
    "taylorseer_cache": Cache("TaylorSeer", "step"),
    "pyramid_attention_broadcast": Cache("PyramidAttentionBroadcast", "step", per_context=False),
    "faster_cache": Cache("FasterCache", "step", per_context=False, needs_both_branches=True),
    "text_kv_cache": Cache("TextKVCache", "text"),
    "sea_cache": Cache("SeaCache", "latents"),
}


def cache_of(hook: Any) -> Cache | None:
    """Return the cache that a hook of diffusers belongs to; None for a subclass of such a hook."""
    folder, _, name = type(hook).__module__.rpartition(".")
    return CACHES.get(name) if folder == "diffusers.hooks" else None
