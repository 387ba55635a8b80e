"""Allegro."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.tiny import STEPS, Tiny, padding_mask, randn

_ALLEGRO = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "cross_attention_dim": 48,
    "caption_channels": 8,
}


def _video(g: torch.Generator) -> dict[str, Any]:
    """Five frames of seven patches, with a table of rotary positions for each axis."""
    places = torch.cartesian_prod(torch.arange(5), torch.arange(1), torch.arange(7))
    return {
        "hidden_states": randn(g, 2, 4, 5, 2, 14),
        "encoder_hidden_states": randn(g, 2, 7, 8),
        "timestep": STEPS,
        "encoder_attention_mask": padding_mask(4),
        "image_rotary_emb": (
            tuple((randn(g, axis, 4), randn(g, axis, 4)) for axis in (5, 1, 7)),
            tuple(places.T.reshape(3, 1, 35)),
        ),
    }


TINY = {
    "allegro": Tiny("AllegroTransformer3DModel", _ALLEGRO, _video),
    "allegro_masked": Tiny(
        "AllegroTransformer3DModel",
        _ALLEGRO,
        lambda g: {**_video(g), "attention_mask": padding_mask(3, 5)[:, :, None, None].expand(2, 5, 2, 14)},
    ),
}
