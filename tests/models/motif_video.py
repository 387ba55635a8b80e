"""Motif-Video."""

from __future__ import annotations

from typing import Any

from torch import Generator

from tests.models.tiny import STEPS, Tiny, padding_mask, randn, with_short_text

_CONFIG = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_single_layers": 4,
    "num_decoder_layers": 2,
    "mlp_ratio": 2.0,
    "patch_size": 1,
    "text_embed_dim": 16,
    "image_embed_dim": 8,
    "rope_axes_dim": (4, 4, 4),
    "enable_text_cross_attention_dual": True,
    "enable_text_cross_attention_single": True,
}
_PLAIN = {
    **_CONFIG,
    "image_embed_dim": None,
    "num_single_layers": 2,
    "num_decoder_layers": 0,
    "enable_text_cross_attention_dual": False,
    "enable_text_cross_attention_single": False,
}


def _inputs(g: Generator) -> dict[str, Any]:
    return {
        "hidden_states": randn(g, 2, 4, 3, 1, 5),
        "timestep": STEPS,
        "encoder_hidden_states": randn(g, 2, 7, 16),
    }


def _masked(g: Generator) -> dict[str, Any]:
    return {**_inputs(g), "encoder_attention_mask": padding_mask(4), "image_embeds": randn(g, 2, 5, 8)}


TINY = {
    "motif_video": Tiny("MotifVideoTransformer3DModel", _CONFIG, _masked),
    "motif_video_short_text": Tiny("MotifVideoTransformer3DModel", _CONFIG, lambda g: with_short_text(_masked(g), 2)),
    "motif_video_without_mask": Tiny("MotifVideoTransformer3DModel", _PLAIN, _inputs),
}
