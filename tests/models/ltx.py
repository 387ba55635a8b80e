"""LTX-Video."""

from __future__ import annotations

from tests.models.tiny import STEPS, Tiny, padding_mask, randn

TINY = {
    "ltx": Tiny(
        "LTXVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 4,
            "attention_head_dim": 8,
            "cross_attention_dim": 32,
            "num_layers": 2,
            "qk_norm": "rms_norm_across_heads",
            "caption_channels": 16,
        },
        lambda g: {
            "hidden_states": randn(g, 2, 15, 4),
            "encoder_hidden_states": randn(g, 2, 7, 16),
            "timestep": STEPS,
            "encoder_attention_mask": padding_mask(4).bool(),
            "num_frames": 1,
            "height": 3,
            "width": 5,
        },
    ),
}
