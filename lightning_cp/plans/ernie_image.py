"""ERNIE-Image: one stream of image and text, tokens in front of the batch; modulation comes expanded to every token."""

from lightning_cp.plans.plan import Plan, split

PLANS = {
    "ErnieImageTransformer2DModel": Plan(
        blocks={
            "layers": {
                "x": split(0, "image"),
                "rotary_pos_emb": split(1, "image"),
                "temb": split(0, "image"),
                "attention_mask": split(-1, "image"),
            },
        },
        gather={"final_linear": split(0, "image")},
    ),
}
