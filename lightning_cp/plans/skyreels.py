"""SkyReels-V2: like Wan; diffusion forcing adds per-token modulation and a block-causal mask over the frames.

The modulation after the blocks is computed for the whole video, so the video is gathered before it.
"""

from lightning_cp.plans.plan import LOCAL, Plan, mask, patches, split

PLANS = {
    "SkyReelsV2Transformer3DModel": Plan(
        blocks={
            "blocks": {
                "hidden_states": split(1, "image"),
                "temb": split(2, "image", ndim=4),
                "rotary_emb": split(1, "image"),
                "attention_mask": mask("image"),
            }
        },
        attention={"attn1": ("image",), "attn2": LOCAL},
        gather={"blocks.-1": split(1, "image")},
        embeddings={"patch_embedding": "image"},
        patches=patches("image", once=("condition_embedder.text_embedder", "condition_embedder.image_embedder")),
    )
}
