"""Stable Diffusion 3."""

from __future__ import annotations

from tests.models.tiny import STEPS, Tiny, randn

TINY = {
    "sd3": Tiny(
        "SD3Transformer2DModel",
        {
            "sample_size": 32,
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 3,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "caption_projection_dim": 32,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 64,
            "out_channels": 4,
            "pos_embed_max_size": 96,
            "dual_attention_layers": (0,),
            "qk_norm": None,
        },
        lambda g: {
            "hidden_states": randn(g, 2, 4, 3, 5),
            "encoder_hidden_states": randn(g, 2, 7, 32),
            "pooled_projections": randn(g, 2, 64),
            "timestep": STEPS,
        },
    ),
}
