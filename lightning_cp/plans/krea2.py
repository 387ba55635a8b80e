"""Krea 2: one stream of text and image, with a key mask. Text layers are fused before the blocks, on the whole text."""

from lightning_cp.plans.plan import Plan, split

PLANS = {
    "Krea2Transformer2DModel": Plan(
        blocks={
            "transformer_blocks": {
                "hidden_states": split(1, "image"),
                "image_rotary_emb": split(0, "image"),
                "attention_mask": split(-1, "image"),
            },
        },
        gather={"transformer_blocks.-1": split(1, "image")},
    ),
}
