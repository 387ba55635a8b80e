"""LongCat-AudioDiT."""

from __future__ import annotations

from typing import Any

from tests.models.tiny import TIMES, Tiny, padding_mask, randn

_CONFIG = {"dit_dim": 32, "dit_depth": 2, "dit_heads": 4, "dit_text_dim": 16, "latent_dim": 4}


def _longcat(*without: str, **config: Any) -> Tiny:
    return Tiny(
        "LongCatAudioDiTTransformer",
        {**_CONFIG, **config},
        lambda g: {
            name: x
            for name, x in {
                "hidden_states": randn(g, 2, 17, 4),
                "encoder_hidden_states": randn(g, 2, 7, 16),
                "encoder_attention_mask": padding_mask(4).bool(),
                "timestep": TIMES,
                "attention_mask": padding_mask(12, 17).bool(),
                "latent_cond": randn(g, 2, 17, 4),
            }.items()
            if name not in without
        },
    )


TINY = {
    "longcat_audio": _longcat(),
    "longcat_audio_local_modulation": _longcat(
        "attention_mask",
        "latent_cond",
        adaln_type="local",
        long_skip=False,
        text_conv=False,
        cross_attn_norm=True,
    ),
    "longcat_audio_without_text_attention": _longcat(cross_attn=False, qk_norm=False, use_latent_condition=False),
}
