"""HunyuanDiT: self-attention over the image, cross-attention on replicated text; long skips connect local shards."""

from lightning_cp.plans.plan import LOCAL, Plan, patches, split

PLANS = {
    "HunyuanDiT2DModel": Plan(
        inputs={"controlnet_block_samples": split(1, "image")},
        blocks={"blocks": {"hidden_states": split(1, "image"), "image_rotary_emb": split(0, "image")}},
        attention={"attn1": ("image",), "attn2": LOCAL},
        gather={"proj_out": split(1, "image")},
        patches=patches("image", stages=False),
    )
}
