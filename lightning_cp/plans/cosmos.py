"""Cosmos: self-attention over the video, cross-attention on replicated text (and image) tokens.

With one timestep per frame, modulation is per token and is split. With one per sample, it has no token dim.
"""

from lightning_cp.plans.plan import LOCAL, Plan, patches, split

_MODULATION = {"embedded_timestep": split(1, "image", ndim=3), "temb": split(1, "image", ndim=3)}

PLANS = {
    "CosmosTransformer3DModel": Plan(
        blocks={
            "transformer_blocks": {
                "hidden_states": split(1, "image"),
                **_MODULATION,
                "image_rotary_emb": split(0, "image"),
                "extra_pos_emb": split(1, "image"),
                "controlnet_residual": split(1, "image"),
            }
        },
        arguments={"norm_out": _MODULATION},
        attention={"attn1": ("image",), "attn2": LOCAL},
        gather={"proj_out": split(1, "image")},
        required={"encoder_hidden_states": "without text its cross-attention would attend to the split video"},
        patches=patches("image"),
    )
}
