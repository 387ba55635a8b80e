"""ERNIE-Image: one modality of image and text, [tokens, batch, ...]; modulation is already expanded to every token."""

from lightning_cp.plans.plan import Plan, patches, split

PLANS = {
    "ErnieImageTransformer2DModel": Plan(
        blocks={
            "layers": {
                "x": split(0, "image"),
                "rotary_pos_emb": split(1, "image"),
                "temb": split(0, "image"),
                "attention_mask": split(-1, "image"),
            }
        },
        gather={"final_linear": split(0, "image")},
        patches=patches("image"),
    )
}
