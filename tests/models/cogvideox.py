"""CogVideoX and ConsisID."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.tiny import STEPS, Tiny, padding_mask, randn

_VIDEO = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 8,
    "num_layers": 2,
    "sample_width": 14,
    "sample_height": 2,
    "patch_size": 2,
    "temporal_compression_ratio": 4,
    "use_rotary_positional_embeddings": True,
}


def _video(g: torch.Generator, frames: int = 5, text: int = 7) -> dict[str, Any]:
    """Five frames of seven patches."""
    return {
        "hidden_states": randn(g, 2, frames, 4, 2, 14),
        "encoder_hidden_states": randn(g, 2, text, 8),
        "timestep": STEPS,
        "image_rotary_emb": (randn(g, 35, 12), randn(g, 35, 12)),
    }


TINY = {
    "cogvideox": Tiny(
        "CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 4,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 2,
            "text_embed_dim": 8,
            "num_layers": 2,
            "sample_width": 10,
            "sample_height": 6,
            "sample_frames": 1,
            "patch_size": 2,
            "temporal_compression_ratio": 4,
            "max_text_seq_length": 7,
            "use_rotary_positional_embeddings": True,
        },
        lambda g: {
            "hidden_states": randn(g, 2, 1, 4, 6, 10),
            "encoder_hidden_states": randn(g, 2, 7, 8),
            "timestep": STEPS,
            "image_rotary_emb": (randn(g, 15, 8), randn(g, 15, 8)),
        },
    ),
    "cogvideox_1_5": Tiny(
        "CogVideoXTransformer3DModel",
        {**_VIDEO, "patch_size_t": 2, "ofs_embed_dim": 8, "patch_bias": False},
        lambda g: {**_video(g, frames=10, text=2), "ofs": torch.full((1,), 2.0, dtype=torch.float64)},
    ),
    "cogvideox_masked": Tiny(
        "CogVideoXTransformer3DModel",
        {
            **_VIDEO,
            "use_rotary_positional_embeddings": False,
            "sample_frames": 17,
            "max_text_seq_length": 7,
        },
        lambda g: {
            **_video(g),
            "image_rotary_emb": None,
            "attention_kwargs": {"attention_mask": torch.cat([padding_mask(4), padding_mask(30, 35)], 1).bool()},
        },
    ),
    "consisid": Tiny(
        "ConsisIDTransformer3DModel",
        {
            **_VIDEO,
            "is_train_face": True,
            "cross_attn_interval": 1,
            "cross_attn_dim_head": 8,
            "cross_attn_num_heads": 2,
            "LFE_id_dim": 6,
            "LFE_vit_dim": 8,
            "LFE_depth": 2,
            "LFE_dim_head": 8,
            "LFE_num_heads": 2,
            "LFE_num_id_token": 2,
            "LFE_num_querie": 3,
            "LFE_output_dim": 32,
            "LFE_ff_mult": 1,
            "LFE_num_scale": 2,
        },
        lambda g: {
            **_video(g),
            "id_cond": randn(g, 2, 6),
            "id_vit_hidden": [randn(g, 2, 5, 8), randn(g, 2, 5, 8)],
        },
    ),
}
