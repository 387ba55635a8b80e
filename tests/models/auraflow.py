"""AuraFlow."""

from __future__ import annotations

from tests.models.tiny import TIMES, Tiny, randn

TINY = {
    "auraflow": Tiny(
        "AuraFlowTransformer2DModel",
        {
            "sample_size": 16,
            "patch_size": 2,
            "in_channels": 4,
            "num_mmdit_layers": 2,
            "num_single_dit_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "caption_projection_dim": 32,
            "joint_attention_dim": 16,
            "out_channels": 4,
            "pos_embed_max_size": 64,
        },
        lambda g: {
            "hidden_states": randn(g, 2, 4, 10, 14),
            "encoder_hidden_states": randn(g, 2, 5, 16),
            "timestep": TIMES,
        },
    ),
}
