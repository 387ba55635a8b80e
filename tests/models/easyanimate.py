"""EasyAnimate."""

from __future__ import annotations

from typing import Any

from torch import Generator

from tests.models.tiny import STEPS, Tiny, randn

_CONFIG = {
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "in_channels": 4,
    "out_channels": 4,
    "mmdit_layers": 2,
    "num_layers": 2,
    "patch_size": 2,
    "text_embed_dim": 16,
    "time_embed_dim": 8,
}


def _inputs(g: Generator, text: int) -> dict[str, Any]:
    return {
        "hidden_states": randn(g, 2, 4, 1, 6, 10),
        "timestep": STEPS,
        "encoder_hidden_states": randn(g, 2, text, 16),
    }


TINY = {
    "easyanimate": Tiny("EasyAnimateTransformer3DModel", _CONFIG, lambda g: _inputs(g, 7)),
    "easyanimate_short_text": Tiny("EasyAnimateTransformer3DModel", _CONFIG, lambda g: _inputs(g, 2)),
    "easyanimate_shared_weights": Tiny(
        "EasyAnimateTransformer3DModel",
        {**_CONFIG, "mmdit_layers": 1, "in_channels": 8, "text_embed_dim_t5": 8, "after_norm": True},
        lambda g: {
            **_inputs(g, 4),
            "encoder_hidden_states_t5": randn(g, 2, 3, 8),
            "inpaint_latents": randn(g, 2, 3, 1, 6, 10),
            "control_latents": randn(g, 2, 1, 1, 6, 10),
        },
    ),
}
