"""FLUX.1 and FLUX.2."""

from __future__ import annotations

import torch

from tests.models.tiny import TIMES, Tiny, randn

_FLUX = {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
}


def flux(text: int = 7) -> Tiny:
    """FLUX with a text of so many tokens."""
    return Tiny(
        "FluxTransformer2DModel",
        {**_FLUX, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]},
        lambda g: {
            "hidden_states": randn(g, 2, 15, 4),
            "encoder_hidden_states": randn(g, 2, text, 32),
            "pooled_projections": randn(g, 2, 32),
            "img_ids": randn(g, 15, 3),
            "txt_ids": randn(g, text, 3),
            "timestep": TIMES,
        },
    )


TINY = {
    "flux": flux(),
    "flux_short_text": flux(2),
    "flux2": Tiny(
        "Flux2Transformer2DModel",
        {**_FLUX, "timestep_guidance_channels": 256, "axes_dims_rope": [4, 4, 4, 4]},
        lambda g: {
            "hidden_states": randn(g, 2, 15, 4),
            "encoder_hidden_states": randn(g, 2, 7, 32),
            "img_ids": randn(g, 2, 15, 4),
            "txt_ids": randn(g, 2, 7, 4),
            "timestep": TIMES,
            "guidance": torch.ones(2, dtype=torch.float64),
        },
    ),
}
