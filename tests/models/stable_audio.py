"""Stable Audio 1 and 3."""

from __future__ import annotations

from typing import Any

from tests.models.tiny import TIMES, Tiny, padding_mask, randn

_CONFIG = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_attention_heads": 2,
    "cross_attention_dim": 16,
    "time_proj_dim": 8,
    "global_states_input_dim": 12,
    "cross_attention_input_dim": 16,
}
_CONFIG3 = {
    "io_channels": 4,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
    "cond_token_dim": 16,
    "global_cond_dim": 12,
    "local_add_cond_dim": 5,
    "timestep_features_dim": 8,
    "ff_mult": 2,
    "num_memory_tokens": 5,
}


def _stable_audio3(inpaint: bool = False, audio: int = 17, **config: Any) -> Tiny:
    return Tiny(
        "StableAudio3DiTModel",
        {**_CONFIG3, **config},
        lambda g: {
            "hidden_states": randn(g, 2, 4, audio),
            "timestep": TIMES,
            "encoder_hidden_states": randn(g, 2, 7, 16),
            "global_hidden_states": randn(g, 2, 12),
            "encoder_attention_mask": padding_mask(4).bool(),
            "local_add_cond": randn(g, 2, 5, audio) if inpaint else None,
        },
    )


TINY = {
    "stable_audio": Tiny(
        "StableAudioDiTModel",
        _CONFIG,
        lambda g: {
            "hidden_states": randn(g, 2, 4, 18),
            "timestep": TIMES,
            "encoder_hidden_states": randn(g, 2, 7, 16),
            "global_hidden_states": randn(g, 2, 1, 12),
            "rotary_embedding": (randn(g, 19, 4), randn(g, 19, 4)),
        },
    ),
    "stable_audio_masked": Tiny(
        "StableAudioDiTModel",
        _CONFIG,
        lambda g: {
            "hidden_states": randn(g, 2, 4, 18),
            "timestep": TIMES,
            "encoder_hidden_states": randn(g, 2, 7, 16),
            "global_hidden_states": randn(g, 2, 1, 12),
            "rotary_embedding": (randn(g, 19, 4), randn(g, 19, 4)),
            "attention_mask": padding_mask(11, 18).bool(),
            "encoder_attention_mask": padding_mask(4).bool(),
        },
    ),
    "stable_audio3": _stable_audio3(),
    "stable_audio3_inpaint": _stable_audio3(inpaint=True),
    "stable_audio3_one_memory_token": _stable_audio3(inpaint=True, num_memory_tokens=1),
    "stable_audio3_without_memory": _stable_audio3(
        audio=34, patch_size=2, num_memory_tokens=0, use_differential_attention=False
    ),
}
