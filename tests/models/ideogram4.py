"""Ideogram 4."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.tiny import TIMES, Tiny, randn

_KIND = "Ideogram4Transformer2DModel"
_TEXT, _PADDING, _IMAGE = 3, -1, 2  # indicators of tokens; padding is a segment of its own too
_IDEOGRAM = {
    "in_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "adaln_dim": 16,
    "llm_features_dim": 24,
    "rope_theta": 10000,
    "mrope_section": (2, 1, 1),
}


def packed(g: torch.Generator) -> dict[str, Any]:
    """23 tokens; the first sample holds two segments of text and image, the second is padded in front."""
    role = [[_TEXT] * 4 + [_IMAGE] * 6 + [_TEXT] * 3 + [_IMAGE] * 10, [_PADDING] * 5 + [_TEXT] * 2 + [_IMAGE] * 16]
    segment = [[1] * 10 + [2] * 13, [_PADDING] * 5 + [1] * 18]
    return {
        "hidden_states": randn(g, 2, 23, 16),
        "timestep": TIMES,
        "encoder_hidden_states": randn(g, 2, 23, 24),
        "position_ids": torch.randint(0, 50, (2, 23, 3), generator=g),
        "segment_ids": torch.tensor(segment),
        "indicator": torch.tensor(role),
    }


TINY = {
    "ideogram4": Tiny(_KIND, _IDEOGRAM, packed),
    "ideogram4_per_token_timestep": Tiny(
        _KIND, _IDEOGRAM, lambda g: {**packed(g), "timestep": torch.rand(2, 23, generator=g, dtype=torch.float64)}
    ),
}
