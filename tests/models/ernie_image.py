"""ERNIE-Image."""

from __future__ import annotations

import torch

from tests.models.tiny import STEPS, Tiny, randn

TINY = {
    "ernie_image": Tiny(
        "ErnieImageTransformer2DModel",
        {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_layers": 2,
            "ffn_hidden_size": 32,
            "in_channels": 4,
            "out_channels": 4,
            "patch_size": 1,
            "text_in_dim": 16,
            "rope_axes_dim": (4, 2, 2),
        },
        lambda g: {
            "hidden_states": randn(g, 2, 4, 4, 4),
            "timestep": STEPS,
            "text_bth": randn(g, 2, 7, 16),
            "text_lens": torch.tensor([7, 4]),
        },
    ),
}
