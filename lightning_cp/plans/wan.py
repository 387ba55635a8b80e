"""Wan: self-attention over the video, cross-attention on replicated text (and image) tokens.

A timestep for each token (Wan 2.2 text-and-image to video) is split with the tokens; one for each sample is not.
"""

from lightning_cp.plans.plan import LOCAL, Plan, split

PLANS = {
    "WanTransformer3DModel": Plan(
        inputs={"timestep": split(1, "image", ndim=2)},
        blocks={
            "blocks": {
                "hidden_states": split(1, "image"),
                "temb": split(1, "image", ndim=4),
                "rotary_emb": split(1, "image"),
            },
        },
        attention={"attn1": ("image",), "attn2": LOCAL},
        gather={"proj_out": split(1, "image")},
    ),
}
