"""Mochi."""

from __future__ import annotations

from tests.models.tiny import STEPS, Tiny, padding_mask, randn


def mochi(text: int = 7, kept: int = 4) -> Tiny:
    """Mochi with a text of so many tokens; the second sample keeps fewer."""
    return Tiny(
        "MochiTransformer3DModel",
        {
            "patch_size": 2,
            "num_attention_heads": 4,
            "attention_head_dim": 8,
            "num_layers": 3,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 4,
            "max_sequence_length": 16,
        },
        lambda g: {
            "hidden_states": randn(g, 2, 4, 5, 2, 14),
            "encoder_hidden_states": randn(g, 2, text, 16),
            "timestep": STEPS,
            "encoder_attention_mask": padding_mask(kept, text).bool(),
        },
    )


TINY = {"mochi": mochi(), "mochi_short_text": mochi(2, 1)}
