"""Krea 2: text and image are one modality, with a key mask. Text layers are fused before the blocks, on whole text."""

from lightning_cp.plans.plan import Plan, patches, split

PLANS = {
    "Krea2Transformer2DModel": Plan(
        blocks={
            "transformer_blocks": {
                "hidden_states": split(1, "image"),
                "image_rotary_emb": split(0, "image"),
                "attention_mask": split(-1, "image"),
            }
        },
        gather={"transformer_blocks.-1": split(1, "image")},
        patches=patches("image"),
    )
}
