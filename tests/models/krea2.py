"""Krea 2."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.models.tiny import TIMES, Tiny, padding_mask, randn


def _positions(text: int = 7, height: int = 4, width: int = 4) -> Tensor:
    """[text + height * width, 3]: zeros for the text, then the grid of the image."""
    grid = torch.cartesian_prod(torch.arange(1), torch.arange(height), torch.arange(width))
    return torch.cat([torch.zeros(text, 3), grid])


def krea2(mask: Tensor | None) -> Tiny:
    """Krea 2 with a text of 7 tokens and a mask of them."""
    return Tiny(
        "Krea2Transformer2DModel",
        {
            "in_channels": 16,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "timestep_embed_dim": 8,
            "text_hidden_dim": 16,
            "num_text_layers": 3,
            "text_num_attention_heads": 4,
            "text_num_key_value_heads": 2,
            "text_intermediate_size": 16,
            "num_layerwise_text_blocks": 1,
            "num_refiner_text_blocks": 1,
            "axes_dims_rope": (4, 2, 2),
        },
        lambda g: {
            "hidden_states": randn(g, 2, 16, 16),
            "encoder_hidden_states": randn(g, 2, 7, 3, 16),
            "timestep": TIMES,
            "position_ids": _positions(),
            "encoder_attention_mask": mask,
        },
    )


TINY = {"krea2": krea2(padding_mask(4).bool()), "krea2_no_mask": krea2(None)}
