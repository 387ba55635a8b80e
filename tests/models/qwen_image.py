"""QwenImage."""

from __future__ import annotations

from tests.models.tiny import TIMES, Tiny, padding_mask, randn

TINY = {
    "qwen_image": Tiny(
        "QwenImageTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 4,
            "joint_attention_dim": 16,
            "guidance_embeds": False,
            "axes_dims_rope": (8, 4, 4),
        },
        lambda g: {
            "hidden_states": randn(g, 2, 15, 16),
            "encoder_hidden_states": randn(g, 2, 7, 16),
            "encoder_hidden_states_mask": padding_mask(4),
            "timestep": TIMES,
            "img_shapes": [[(1, 3, 5)]] * 2,
        },
    ),
}
