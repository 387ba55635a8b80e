"""AnyFlow: as Wan, with two timesteps for each frame, so each token has its own modulation, also after the blocks."""

from lightning_cp.plans.plan import LOCAL, Plan, split

PLANS = {
    "AnyFlowTransformer3DModel": Plan(
        blocks={
            "blocks": {
                "hidden_states": split(1, "image"),
                "temb": split(1, "image"),
                "rotary_emb": split(2, "image"),
            },
        },
        attention={"attn1": ("image",), "attn2": LOCAL},
        gather={"blocks.-1": split(1, "image")},
    ),
}
