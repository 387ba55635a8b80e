"""Latte."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.tiny import STEPS, Tiny, padding_mask, randn

_LATTE = {
    "sample_size": 14,
    "num_layers": 2,
    "patch_size": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "caption_channels": 8,
    "in_channels": 4,
    "cross_attention_dim": 32,
    "out_channels": 8,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "video_length": 3,
}


def _video(g: torch.Generator) -> dict[str, Any]:
    """Three frames; the mask is a bias for each of them."""
    return {
        "hidden_states": randn(g, 2, 4, 3, 10, 14),
        "timestep": STEPS,
        "encoder_hidden_states": randn(g, 2, 7, 8),
        "encoder_attention_mask": (padding_mask(4).double() - 1).mul(1e4)[:, None].repeat_interleave(3, 0),
    }


TINY = {
    "latte": Tiny("LatteTransformer3DModel", _LATTE, _video),
    "latte_spatial": Tiny(
        "LatteTransformer3DModel", _LATTE, lambda g: {**_video(g), "enable_temporal_attentions": False}
    ),
}
