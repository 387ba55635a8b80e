"""GLM-Image."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.tiny import STEPS, Tiny, padding_mask, randn

_GLM = {
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "text_embed_dim": 16,
    "time_embed_dim": 16,
    "condition_dim": 8,
    "prior_vq_quantizer_codebook_size": 64,
}


def _picture(g: torch.Generator, text: int = 7) -> dict[str, Any]:
    return {
        "hidden_states": randn(g, 2, 4, 10, 14),
        "encoder_hidden_states": randn(g, 2, text, 16),
        "prior_token_id": torch.randint(0, 64, (2, 35), generator=g),
        "prior_token_drop": torch.rand(2, 35, generator=g) < 0.3,
        "timestep": STEPS,
        "target_size": torch.tensor([[80.0, 112.0], [64.0, 48.0]]),
        "crop_coords": torch.tensor([[0.0, 0.0], [3.0, 5.0]]),
    }


TINY = {
    "glm_image": Tiny("GlmImageTransformer2DModel", _GLM, lambda g: {**_picture(g), "attention_mask": padding_mask(4)}),
    "glm_image_unmasked": Tiny("GlmImageTransformer2DModel", _GLM, lambda g: _picture(g, text=2)),
}
