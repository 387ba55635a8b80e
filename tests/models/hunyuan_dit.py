"""HunyuanDiT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator

from tests.models.tiny import STEPS, Tiny, padding_mask, randn


def _config(layers: int) -> dict[str, Any]:
    return {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "num_layers": layers,
        "attention_head_dim": 4,
        "num_attention_heads": 4,
        "cross_attention_dim": 8,
        "cross_attention_dim_t5": 8,
        "pooled_projection_dim": 4,
        "hidden_size": 16,
        "text_len": 7,
        "text_len_t5": 3,
    }


def _inputs(g: Generator) -> dict[str, Any]:
    return {
        "hidden_states": randn(g, 2, 4, 6, 10),
        "timestep": STEPS.double(),
        "encoder_hidden_states": randn(g, 2, 7, 8),
        "text_embedding_mask": padding_mask(4),
        "encoder_hidden_states_t5": randn(g, 2, 3, 8),
        "text_embedding_mask_t5": padding_mask(1, 3),
        "image_meta_size": 100 * randn(g, 2, 6),
        "style": torch.tensor([0, 0]),
    }


TINY = {
    "hunyuan_dit": Tiny(
        "HunyuanDiT2DModel",
        _config(4),
        lambda g: {**_inputs(g), "image_rotary_emb": (randn(g, 15, 4), randn(g, 15, 4))},
    ),
    "hunyuan_dit_controlnet": Tiny(
        "HunyuanDiT2DModel",
        {**_config(6), "use_style_cond_and_image_meta_size": False},
        lambda g: {**_inputs(g), "controlnet_block_samples": [randn(g, 2, 15, 16) for _ in range(2)]},
    ),
}
