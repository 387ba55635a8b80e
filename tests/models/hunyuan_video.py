"""HunyuanVideo, FramePack and HunyuanVideo 1.5."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator

from tests.models.tiny import STEPS, Tiny, padding_mask, randn, with_short_text

_VIDEO = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 10,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "patch_size": 1,
    "patch_size_t": 1,
    "guidance_embeds": True,
    "text_embed_dim": 16,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (2, 4, 4),
    "image_condition_type": None,
}
_TOKEN_REPLACE = {**_VIDEO, "image_condition_type": "token_replace", "num_layers": 2, "num_single_layers": 2}
_FRAMEPACK = {**_VIDEO, "patch_size": 2, "has_image_proj": True, "image_proj_dim": 16, "has_clean_x_embedder": True}
_VIDEO15 = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "text_embed_dim": 16,
    "text_embed_2_dim": 8,
    "image_embed_dim": 12,
    "rope_axes_dim": (2, 2, 4),
}


def _video(g: Generator, *size: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(g, 2, 4, *size),
        "timestep": STEPS,
        "encoder_hidden_states": randn(g, 2, 7, 16),
        "pooled_projections": randn(g, 2, 8),
        "encoder_attention_mask": padding_mask(4).double(),
        "guidance": torch.tensor([4.0, 4.0], dtype=torch.float64),
    }


def _framepack(g: Generator) -> dict[str, Any]:
    """53 tokens: histories of 2, 6 and 30, and the video's 15."""
    return {
        **_video(g, 1, 6, 10),
        "encoder_attention_mask": padding_mask(2).double(),
        "image_embeds": randn(g, 2, 5, 16),
        "indices_latents": torch.tensor([9.0]),
        "latents_clean": randn(g, 2, 4, 2, 6, 10),
        "indices_latents_clean": torch.tensor([0.0, 7.0]),
        "latents_history_2x": randn(g, 2, 4, 2, 6, 10),
        "indices_latents_history_2x": torch.tensor([5.0, 6.0]),
        "latents_history_4x": randn(g, 2, 4, 4, 6, 10),
        "indices_latents_history_4x": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    }


def _one_sample(arguments: dict[str, Any]) -> dict[str, Any]:
    """The second sample alone. Its text is cut to the length of its mask."""
    return {name: x if name.startswith("indices") else x[1:] for name, x in arguments.items()}


def _video15(g: Generator) -> dict[str, Any]:
    return {
        "hidden_states": randn(g, 2, 4, 1, 3, 5),
        "timestep": STEPS.double(),
        "encoder_hidden_states": randn(g, 2, 7, 16),
        "encoder_attention_mask": padding_mask(4).double(),
        "encoder_hidden_states_2": randn(g, 2, 3, 8),
        "encoder_attention_mask_2": padding_mask(2, 3).double(),
        "image_embeds": randn(g, 2, 3, 12),
    }


TINY = {
    "hunyuan_video": Tiny("HunyuanVideoTransformer3DModel", _VIDEO, lambda g: _video(g, 1, 3, 5)),
    "hunyuan_video_short_text": Tiny(
        "HunyuanVideoTransformer3DModel", _VIDEO, lambda g: with_short_text(_video(g, 1, 3, 5), 2)
    ),
    "hunyuan_video_token_replace": Tiny("HunyuanVideoTransformer3DModel", _TOKEN_REPLACE, lambda g: _video(g, 3, 1, 7)),
    "hunyuan_video_token_replace_short_text": Tiny(
        "HunyuanVideoTransformer3DModel", _TOKEN_REPLACE, lambda g: with_short_text(_video(g, 7, 1, 1), 2)
    ),
    "framepack": Tiny("HunyuanVideoFramepackTransformer3DModel", _FRAMEPACK, _framepack),
    "framepack_one_sample": Tiny(
        "HunyuanVideoFramepackTransformer3DModel", _FRAMEPACK, lambda g: _one_sample(_framepack(g))
    ),
    "hunyuan_video15": Tiny("HunyuanVideo15Transformer3DModel", _VIDEO15, _video15),
    "hunyuan_video15_text_to_video": Tiny(
        "HunyuanVideo15Transformer3DModel",
        {**_VIDEO15, "use_meanflow": True},
        lambda g: {
            **with_short_text(_video15(g), 2),
            "image_embeds": torch.zeros(2, 3, 12, dtype=torch.float64),
            "timestep_r": torch.tensor([17.0, 92.0], dtype=torch.float64),
        },
    ),
}
