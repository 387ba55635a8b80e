"""Helios."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.tiny import STEPS, Tiny, randn
from tests.models.wan import WAN

_CONFIG = {
    **{name: value for name, value in WAN.items() if name != "rope_max_seq_len"},
    "rope_dim": (4, 4, 4),
    "has_multi_term_memory_patch": True,
    "guidance_cross_attn": True,
    "zero_history_timestep": True,
    "is_amplify_history": False,
}


def helios(g: torch.Generator, **frames: int) -> dict[str, Any]:
    """A video of 25 tokens after a history of so many frames (short, mid, long)."""
    inputs: dict[str, Any] = {
        "hidden_states": randn(g, 2, 4, 5, 2, 10),
        "encoder_hidden_states": randn(g, 2, 7, 16),
        "timestep": STEPS,
        "indices_hidden_states": torch.arange(9.0, 14.0).repeat(2, 1),
    }
    start = 0
    for name, count in frames.items():
        inputs[f"latents_history_{name}"] = randn(g, 2, 4, count, 2, 10)
        inputs[f"indices_latents_history_{name}"] = torch.arange(float(start), start + count).repeat(2, 1)
        start += count
    return inputs


TINY = {
    "helios": Tiny("HeliosTransformer3DModel", _CONFIG, lambda g: helios(g, long=4, mid=2, short=1)),
    "helios_amplified": Tiny(
        "HeliosTransformer3DModel",
        {**_CONFIG, "guidance_cross_attn": False, "zero_history_timestep": False, "is_amplify_history": True},
        lambda g: helios(g, long=4, mid=2, short=3),
    ),
    "helios_without_history": Tiny(
        "HeliosTransformer3DModel", {**_CONFIG, "has_multi_term_memory_patch": False}, helios
    ),
    "helios_short_history": Tiny(
        "HeliosTransformer3DModel",
        _CONFIG,
        lambda g: {
            **helios(g),
            "latents_history_short": randn(g, 2, 4, 1, 2, 4),
            "indices_latents_history_short": torch.tensor([[0.0], [3.0]]),
        },
    ),
}
