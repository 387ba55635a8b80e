"""HunyuanVideo."""

from __future__ import annotations

import torch

from tests.models.tiny import STEPS, Tiny, padding_mask, randn

TINY = {
    "hunyuan_video": Tiny(
        "HunyuanVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 4,
            "attention_head_dim": 10,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "patch_size": 1,
            "patch_size_t": 1,
            "guidance_embeds": True,
            "text_embed_dim": 16,
            "pooled_projection_dim": 8,
            "rope_axes_dim": (2, 4, 4),
            "image_condition_type": None,
        },
        lambda g: {
            "hidden_states": randn(g, 2, 4, 1, 3, 5),
            "timestep": STEPS,
            "encoder_hidden_states": randn(g, 2, 7, 16),
            "pooled_projections": randn(g, 2, 8),
            "encoder_attention_mask": padding_mask(4).double(),
            "guidance": torch.tensor([4.0, 4.0], dtype=torch.float64),
        },
    ),
}
