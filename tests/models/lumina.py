"""Lumina-Next and Lumina 2."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.tiny import STEPS, TIMES, Tiny, padding_mask, randn


def lumina2(kept: int) -> Tiny:
    """Lumina 2, the second sample with so many of its 7 text tokens: a mask only where they are fewer."""
    return Tiny(
        "Lumina2Transformer2DModel",
        {
            "sample_size": 16,
            "patch_size": 2,
            "in_channels": 4,
            "hidden_size": 32,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "multiple_of": 2,
            "axes_dim_rope": (4, 2, 2),
            "axes_lens": (32, 16, 16),
            "cap_feat_dim": 16,
        },
        lambda g: {
            "hidden_states": randn(g, 2, 4, 6, 12),
            "timestep": TIMES,
            "encoder_hidden_states": randn(g, 2, 7, 16),
            "encoder_attention_mask": padding_mask(kept).bool(),
        },
    )


def lumina_next(**attention: Any) -> Tiny:
    """Lumina-Next, with arguments of its attention."""
    return Tiny(
        "LuminaNextDiT2DModel",
        {
            "sample_size": 16,
            "patch_size": 2,
            "in_channels": 4,
            "hidden_size": 32,
            "num_layers": 2,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "multiple_of": 16,
            "cross_attention_dim": 16,
        },
        lambda g: {
            "hidden_states": randn(g, 2, 4, 10, 10),
            "timestep": STEPS,
            "encoder_hidden_states": randn(g, 2, 7, 16),
            "encoder_mask": padding_mask(4),
            "image_rotary_emb": torch.polar(torch.ones(8, 8, 4, dtype=torch.float64), randn(g, 8, 8, 4)),
            "cross_attention_kwargs": attention,
        },
    )


TINY = {
    "lumina2": lumina2(4),
    "lumina2_no_mask": lumina2(7),
    "lumina_next": lumina_next(),
    "lumina_next_proportional": lumina_next(base_sequence_length=4),
}
