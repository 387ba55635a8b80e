"""PRX: the image attends to [text | image]; the text is never updated and is split at every block."""

from lightning_cp.plans.plan import Attention, Plan, patches, split

PLANS = {
    "PRXTransformer2DModel": Plan(
        blocks={
            "blocks": {
                "hidden_states": split(1, "image"),
                "encoder_hidden_states": split(1, "text"),
                "image_rotary_emb": split(2, "image"),
                "attention_mask": split(1, "text"),
            }
        },
        attention={"attention": Attention(("image",), ("text", "image"))},
        gather={"final_layer": split(1, "image")},
        patches=patches("text", "image"),
    )
}
