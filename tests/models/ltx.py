"""LTX-Video."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.tiny import STEPS, Tiny, padding_mask, randn

_CONFIG = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "cross_attention_dim": 32,
    "num_layers": 2,
    "qk_norm": "rms_norm_across_heads",
    "caption_channels": 16,
}


def ltx(g: torch.Generator) -> dict[str, Any]:
    """A video of 15 tokens."""
    return {
        "hidden_states": randn(g, 2, 15, 4),
        "encoder_hidden_states": randn(g, 2, 7, 16),
        "timestep": STEPS,
        "encoder_attention_mask": padding_mask(4).bool(),
        "num_frames": 1,
        "height": 3,
        "width": 5,
    }


def per_token(g: torch.Generator, *column: int) -> dict[str, Any]:
    """A video of 25 tokens, with a timestep for each: [b, s], or [b, s, 1] as of LTXI2VLongMultiPromptPipeline."""
    return {
        **ltx(g),
        "hidden_states": randn(g, 2, 25, 4),
        "timestep": torch.randint(0, 900, (2, 25, *column), generator=g),
        "video_coords": randn(g, 2, 3, 25).abs(),
    }


TINY = {
    "ltx": Tiny("LTXVideoTransformer3DModel", _CONFIG, ltx),
    "ltx_per_token_timestep": Tiny("LTXVideoTransformer3DModel", _CONFIG, per_token),
    "ltx_timestep_column": Tiny("LTXVideoTransformer3DModel", _CONFIG, lambda g: per_token(g, 1)),
}
