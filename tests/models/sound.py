"""Models of sound: ACE-Step, LongCat-AudioDiT, MiniMax Music 3, Stable Audio 1 and 3."""

# fmt: off
from __future__ import annotations

from tests.models.tiny import Tiny

_LONGCAT = Tiny(
    "LongCatAudioDiTTransformer",
    {"dit_dim": 32, "dit_depth": 2, "dit_heads": 4, "dit_text_dim": 16, "latent_dim": 4},
)
_STABLE_AUDIO = Tiny(
    "StableAudioDiTModel",
    {
        "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4,
        "num_key_value_attention_heads": 2, "cross_attention_dim": 16, "time_proj_dim": 8,
        "global_states_input_dim": 12, "cross_attention_input_dim": 16,
    },
    {"audio": 18},
)
_STABLE_AUDIO3 = Tiny(
    "StableAudio3DiTModel",
    {
        "io_channels": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "cond_token_dim": 16, "global_cond_dim": 12,
        "local_add_cond_dim": 5, "timestep_features_dim": 8, "ff_mult": 2, "num_memory_tokens": 5,
    },
)
_INPAINT = {"local_add_cond": "float batch local_add_cond_dim audio"}
TINY = {
    "ace_step": Tiny(  # windows of 5 tokens among 17: narrower and wider than a shard
        "AceStepTransformer1DModel",
        {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "in_channels": 12, "audio_acoustic_hidden_dim": 4,
            "patch_size": 2, "sliding_window": 5, "encoder_hidden_size": 16,
        },
        {"audio": 33},
    ),
    "longcat_audio": _LONGCAT,
    "longcat_audio_local_modulation": _LONGCAT.but(
        inputs={"attention_mask": None, "latent_cond": None},
        adaln_type="local", long_skip=False, text_conv=False, cross_attn_norm=True,
    ),
    "longcat_audio_without_text_attention": _LONGCAT.but(
        cross_attn=False, qk_norm=False, use_latent_condition=False
    ),
    "minimax_music3": Tiny(
        "MiniMaxMusic3Transformer1DModel",
        {
            "in_channels": 4, "condition_dim": 16, "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 8,
            "ff_inner_dim": 32, "rotary_dim": 4, "fourier_embedding_dim": 8,
        },
        {"audio": 18},
    ),
    "stable_audio": _STABLE_AUDIO,
    "stable_audio_masked": _STABLE_AUDIO.but(
        inputs={"attention_mask": "mask batch audio", "encoder_attention_mask": "mask batch text"}
    ),
    "stable_audio3": _STABLE_AUDIO3,
    "stable_audio3_inpaint": _STABLE_AUDIO3.but(inputs=_INPAINT),
    "stable_audio3_one_memory_token": _STABLE_AUDIO3.but(inputs=_INPAINT, num_memory_tokens=1),
    "stable_audio3_without_memory": _STABLE_AUDIO3.but(
        {"audio": 34}, patch_size=2, num_memory_tokens=0, use_differential_attention=False
    ),
}
