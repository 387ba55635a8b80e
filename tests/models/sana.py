"""Sana and SanaVideo."""

from __future__ import annotations

from tests.models.tiny import STEPS, Tiny, padding_mask, randn

_SANA = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_cross_attention_heads": 4,
    "caption_channels": 8,
}

TINY = {
    "sana": Tiny(
        "SanaTransformer2DModel",
        {
            **_SANA,
            "patch_size": 1,
            "attention_head_dim": 4,
            "cross_attention_head_dim": 4,
            "cross_attention_dim": 16,
            "sample_size": 7,
            "qk_norm": "rms_norm_across_heads",
        },
        lambda g: {
            "hidden_states": randn(g, 2, 4, 7, 5),
            "encoder_hidden_states": randn(g, 2, 7, 8),
            "encoder_attention_mask": padding_mask(4),
            "timestep": STEPS,
        },
    ),
    "sana_guidance": Tiny(
        "SanaTransformer2DModel",
        {
            **_SANA,
            "patch_size": 2,
            "attention_head_dim": 4,
            "cross_attention_head_dim": 4,
            "cross_attention_dim": 16,
            "sample_size": 14,
            "guidance_embeds": True,
        },
        lambda g: {
            "hidden_states": randn(g, 2, 4, 14, 6),
            "encoder_hidden_states": randn(g, 2, 7, 8),
            "guidance": randn(g, 2),
            "timestep": STEPS,
            "controlnet_block_samples": [randn(g, 2, 21, 16)],
        },
    ),
    "sana_video": Tiny(
        "SanaVideoTransformer3DModel",
        {
            **_SANA,
            "attention_head_dim": 12,
            "cross_attention_head_dim": 12,
            "cross_attention_dim": 48,
            "sample_size": 6,
            "patch_size": (1, 2, 2),
            "rope_max_seq_len": 32,
        },
        lambda g: {
            "hidden_states": randn(g, 2, 4, 7, 6, 4),
            "encoder_hidden_states": randn(g, 2, 7, 8),
            "encoder_attention_mask": padding_mask(4),
            "timestep": STEPS,
        },
    ),
}
