"""CogVideoX."""

from __future__ import annotations

from tests.models.tiny import STEPS, Tiny, randn

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
}
