"""QwenImage 2.1."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.tiny import TIMES, Tiny, randn

_CONFIG = {
    "in_channels": 8,
    "out_channels": 8,
    "num_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "context_in_dim": 16,
    "axes_dims_rope": (4, 4, 4),
}


def _edit(g: torch.Generator) -> dict[str, Any]:
    """Text, a picture of 4 x 2, text with padding in the second sample, then the picture of 4 x 4 to be made."""
    image = [False] * 3 + [True] * 2 + [False] * 4 + [True] * 4
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[1, 7:] = False
    return {
        "hidden_states": randn(g, 2, 24, 8),
        "encoder_hidden_states": randn(g, 2, 9, 16),
        "timestep": TIMES,
        "img_shapes": [[(1, 4, 2), (1, 4, 4)]] * 2,
        "img_mask": torch.tensor([image] * 2),
        "encoder_hidden_states_mask": valid,
    }


def _picture(g: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": randn(g, 2, 12, 8),
        "encoder_hidden_states": randn(g, 2, 5, 16),
        "timestep": TIMES,
        "img_shapes": [[(1, 6, 2)]] * 2,
        "img_mask": torch.tensor([[False] * 5 + [True] * 3] * 2),
    }


TINY = {
    "qwen_image21": Tiny("QwenImage21Transformer2DModel", _CONFIG, _edit),
    "qwen_image21_no_condition": Tiny(
        "QwenImage21Transformer2DModel", {**_CONFIG, "causal_condition": False}, _picture
    ),
}
