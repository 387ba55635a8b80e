"""HunyuanImage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator

from tests.models.tiny import STEPS, Tiny, padding_mask, randn, with_short_text

_CONFIG = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "text_embed_dim": 16,
    "rope_axes_dim": (4, 4),
}
_VIDEO = {**_CONFIG, "patch_size": (1, 1, 1), "rope_axes_dim": (2, 2, 4)}


def _inputs(g: Generator, *size: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(g, 2, 4, *size),
        "timestep": STEPS.double(),
        "encoder_hidden_states": randn(g, 2, 7, 16),
        "encoder_attention_mask": padding_mask(4),
    }


TINY = {
    "hunyuan_image": Tiny(
        "HunyuanImageTransformer2DModel",
        {**_CONFIG, "text_embed_2_dim": 8, "guidance_embeds": True, "use_meanflow": True},
        lambda g: {
            **_inputs(g, 3, 5),
            "encoder_hidden_states_2": randn(g, 2, 4, 8),
            "encoder_attention_mask_2": padding_mask(1, 4),
            "timestep_r": torch.tensor([17.0, 92.0], dtype=torch.float64),
            "guidance": torch.tensor([3.5, 4.0], dtype=torch.float64),
        },
    ),
    "hunyuan_image_with_frames": Tiny("HunyuanImageTransformer2DModel", _VIDEO, lambda g: _inputs(g, 3, 5, 1)),
    "hunyuan_image_short_text": Tiny(
        "HunyuanImageTransformer2DModel", _CONFIG, lambda g: with_short_text(_inputs(g, 1, 7), 2)
    ),
}
