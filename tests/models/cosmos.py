"""Cosmos."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.tiny import TIMES, Tiny, padding_mask, randn

_COSMOS = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "num_layers": 2,
    "mlp_ratio": 2,
    "text_embed_dim": 16,
    "adaln_lora_dim": 4,
    "max_size": (5, 8, 16),
    "patch_size": (1, 2, 2),
    "rope_scale": (2.0, 1.0, 1.0),
    "concat_padding_mask": False,
    "extra_pos_embed_type": None,
}


def _video(g: torch.Generator, channels: int = 4) -> dict[str, Any]:
    """Five frames of seven patches."""
    return {
        "hidden_states": randn(g, 2, channels, 5, 2, 14),
        "encoder_hidden_states": randn(g, 2, 7, 16),
        "timestep": TIMES,
        "attention_mask": padding_mask(4).bool(),
        "fps": 24,
    }


TINY = {
    "cosmos": Tiny("CosmosTransformer3DModel", {**_COSMOS, "extra_pos_embed_type": "learnable"}, _video),
    "cosmos_per_frame_timestep": Tiny(
        "CosmosTransformer3DModel",
        {**_COSMOS, "in_channels": 5},
        lambda g: {
            **_video(g),
            "timestep": torch.rand(2, 1, 5, 1, 1, generator=g, dtype=torch.float64),
            "condition_mask": torch.rand(2, 1, 5, 2, 14, generator=g, dtype=torch.float64),
        },
    ),
    "cosmos_transfer": Tiny(
        "CosmosTransformer3DModel",
        {
            **_COSMOS,
            "use_crossattn_projection": True,
            "crossattn_proj_in_channels": 10,
            "encoder_hidden_states_channels": 16,
            "controlnet_block_every_n": 1,
            "img_context_dim_in": 6,
            "img_context_dim_out": 48,
        },
        lambda g: {
            **_video(g),
            "encoder_hidden_states": (randn(g, 2, 7, 10), randn(g, 2, 5, 6)),
            "attention_mask": None,
            "block_controlnet_hidden_states": [randn(g, 2, 35, 48), randn(g, 2, 35, 48)],
        },
    ),
}
