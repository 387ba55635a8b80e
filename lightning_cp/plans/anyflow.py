"""AnyFlow: like Wan, with two timesteps per frame, so modulation is per token, in the blocks and after them."""

from lightning_cp.plans.plan import LOCAL, Plan, patches, split

PLANS = {
    "AnyFlowTransformer3DModel": Plan(
        blocks={
            "blocks": {"hidden_states": split(1, "image"), "temb": split(1, "image"), "rotary_emb": split(2, "image")}
        },
        attention={"attn1": ("image",), "attn2": LOCAL},
        gather={"blocks.-1": split(1, "image")},
        embeddings={"patch_embedding": "image"},
        patches=patches("image", once=("condition_embedder.text_embedder", "condition_embedder.image_embedder")),
    )
}
