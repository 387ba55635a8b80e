"""LTX-Video: self-attention over the video, cross-attention on replicated, masked text."""

from lightning_cp.plans.plan import LOCAL, Plan, patches, split

PLANS = {
    "LTXVideoTransformer3DModel": Plan(
        inputs={"hidden_states": split(1, "image"), "timestep": split(1, "image", ndim=(2, 3))},
        blocks={
            "transformer_blocks": {
                "hidden_states": split(1, "image"),
                "temb": split(1, "image"),
                "image_rotary_emb": split(1, "image"),
            }
        },
        attention={"attn1": ("image",), "attn2": LOCAL},
        gather={"proj_out": split(1, "image")},
        patches=patches("image", once=("caption_projection",)),
    )
}
