"""Stable Diffusion 3 and 3.5: joint attention; 3.5 has a second one over the image alone."""

from lightning_cp.plans.plan import Plan, split

PLANS = {
    "SD3Transformer2DModel": Plan(
        inputs={"block_controlnet_hidden_states": split(1, "image")},
        blocks={
            "transformer_blocks": {"hidden_states": split(1, "image"), "encoder_hidden_states": split(1, "text")},
        },
        attention={"attn2": ("image",)},
        gather={"proj_out": split(1, "image")},
    ),
}
