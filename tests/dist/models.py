"""Tiny models for which diffusers declares a plan of its own."""

from __future__ import annotations

from typing import Any

import torch

from tests.models import TINY
from tests.models.tiny import STEPS, Tiny, padding_mask, randn
from tests.models.wan import WAN

_HELIOS_HISTORY = {"short": 1, "mid": 1, "long": 4}


def _helios(g: torch.Generator) -> dict[str, Any]:
    inputs = {
        "hidden_states": randn(g, 2, 4, 2, 6, 10),
        "encoder_hidden_states": randn(g, 2, 7, 16),
        "timestep": STEPS,
        "indices_hidden_states": torch.ones(2, 2),
    }
    for name, frames in _HELIOS_HISTORY.items():
        inputs[f"indices_latents_history_{name}"] = torch.ones(2, frames)
        inputs[f"latents_history_{name}"] = randn(g, 2, 4, frames, 8, 8)
    return inputs


THEIR_PLANS: dict[str, Tiny] = {
    **{name: TINY[name] for name in ("flux", "flux2", "qwen_image", "wan", "wan_per_token_timestep", "ltx")},
    **{name: TINY[name] for name in ("wan_image_to_video", "chronoedit", "minimax_h3")},
    "helios": Tiny(
        "HeliosTransformer3DModel",
        {
            **{name: value for name, value in WAN.items() if name != "rope_max_seq_len"},
            "num_layers": 40,  # the plan names this many
            "rope_dim": (4, 4, 4),
            "has_multi_term_memory_patch": True,
            "guidance_cross_attn": True,
            "zero_history_timestep": True,
            "is_amplify_history": False,
        },
        _helios,
    ),
    "ltx2": Tiny(
        "LTX2VideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "patch_size": 1,
            "patch_size_t": 1,
            "num_attention_heads": 4,
            "attention_head_dim": 8,
            "cross_attention_dim": 32,
            "audio_in_channels": 4,
            "audio_out_channels": 4,
            "audio_num_attention_heads": 4,
            "audio_attention_head_dim": 4,
            "audio_cross_attention_dim": 16,
            "num_layers": 2,
            "qk_norm": "rms_norm_across_heads",
            "caption_channels": 16,
            "rope_double_precision": False,
        },
        lambda g: {
            "hidden_states": randn(g, 2, 30, 4),
            "audio_hidden_states": randn(g, 2, 9, 4),
            "encoder_hidden_states": randn(g, 2, 7, 16),
            "audio_encoder_hidden_states": randn(g, 2, 7, 16),
            "timestep": STEPS,
            "encoder_attention_mask": padding_mask(4).bool(),
            "num_frames": 2,
            "height": 3,
            "width": 5,
            "audio_num_frames": 9,
            "fps": 25.0,
            "isolate_modalities": True,  # their plan leaves cross_attn_rope whole, which only this does not use
        },
    ),
}
