"""LTX-2, and the refiner of SANA-WM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.models.tiny import STEPS, Tiny, padding_mask, randn

_CONFIG = {
    "in_channels": 4,
    "out_channels": 4,
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
}
_NEWER = {
    **_CONFIG,
    "gated_attn": True,
    "cross_attn_mod": True,
    "audio_gated_attn": True,
    "audio_cross_attn_mod": True,
    "rope_type": "split",
    "perturbed_attn": True,
    "use_prompt_embeddings": False,
    "use_keyframes_abs_pos_embedding": True,
}


def ltx2(g: torch.Generator, audio: int = 11) -> dict[str, Any]:
    """A video of 25 tokens and so much audio."""
    return {
        "hidden_states": randn(g, 2, 25, 4),
        "audio_hidden_states": randn(g, 2, audio, 4),
        "encoder_hidden_states": randn(g, 2, 7, 16),
        "audio_encoder_hidden_states": randn(g, 2, 7, 16),
        "timestep": STEPS,
        "encoder_attention_mask": padding_mask(4).bool(),
        "audio_encoder_attention_mask": padding_mask(3).bool(),
        "num_frames": 5,
        "height": 1,
        "width": 5,
        "audio_num_frames": audio,
        "fps": 25.0,
    }


def newer(g: torch.Generator) -> dict[str, Any]:
    """A model with the additions after LTX-2.0: timesteps of tokens, coordinates, keyframes, a perturbed block."""
    return {
        **ltx2(g),
        "encoder_hidden_states": randn(g, 2, 7, 32),
        "timestep": steps(g, 25),
        "audio_timestep": steps(g, 11),
        "sigma": STEPS,
        "video_coords": 9 * randn(g, 2, 3, 25, 2).abs(),
        "audio_coords": randn(g, 2, 1, 11, 2).abs(),
        "video_keyframes_mask": torch.randint(0, 2, (2, 25, 1), generator=g),
        "spatio_temporal_guidance_blocks": [1],
        "perturbation_mask": torch.tensor([0.0, 1.0], dtype=torch.float64),
    }


def refiner(g: torch.Generator, *rope: int) -> dict[str, Any]:
    """A window of 25 tokens, with a timestep for each."""
    return {
        "hidden_states": randn(g, 2, 25, 4),
        "encoder_hidden_states": randn(g, 2, 7, 16),
        "timestep": steps(g, 25),
        "video_rotary_emb": (randn(g, *rope), randn(g, *rope)),
        "encoder_attention_mask": padding_mask(4),
    }


def steps(g: torch.Generator, tokens: int) -> Tensor:
    """A timestep for each token."""
    return torch.randint(0, 900, (2, tokens), generator=g)


TINY = {
    "ltx2": Tiny("LTX2VideoTransformer3DModel", _CONFIG, ltx2),
    "ltx2_per_token_timestep": Tiny(
        "LTX2VideoTransformer3DModel",
        _CONFIG,
        lambda g: {**ltx2(g), "timestep": steps(g, 25), "audio_timestep": STEPS},
    ),
    "ltx2_timestep_columns": Tiny(
        "LTX2VideoTransformer3DModel",
        _CONFIG,
        lambda g: {**ltx2(g), "timestep": steps(g, 25)[..., None], "audio_timestep": steps(g, 11)[..., None]},
    ),
    "ltx2_self_attention_mask": Tiny(
        "LTX2VideoTransformer3DModel",
        _CONFIG,
        lambda g: {**ltx2(g), "video_self_attention_mask": torch.rand(2, 25, 25, generator=g).round()},
    ),
    "ltx2_newer": Tiny("LTX2VideoTransformer3DModel", _NEWER, newer),
    "ltx2_cross_timestep": Tiny(
        "LTX2VideoTransformer3DModel",
        {**_NEWER, "use_prompt_adaln_single": False, "audio_cross_attn_mod": False},
        lambda g: {**newer(g), "use_cross_timestep": True, "perturbation_mask": None},
    ),
    "ltx2_isolated": Tiny("LTX2VideoTransformer3DModel", _CONFIG, lambda g: {**ltx2(g), "isolate_modalities": True}),
    "sana_wm_refiner": Tiny("SanaWMLTX2RefinerTransformer3DModel", _CONFIG, lambda g: refiner(g, 2, 25, 32)),
    "sana_wm_refiner_split_rope": Tiny(
        "SanaWMLTX2RefinerTransformer3DModel",
        {**_CONFIG, "rope_type": "split", "gated_attn": True},
        lambda g: refiner(g, 2, 4, 25, 4),
    ),
}
