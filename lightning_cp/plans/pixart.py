"""PixArt and DiT: self-attention over the image; PixArt adds cross-attention on replicated text."""

from lightning_cp.plans.plan import LOCAL, Plan, patches, split

PLANS = {
    "PixArtTransformer2DModel": Plan(
        blocks={"transformer_blocks": {"hidden_states": split(1, "image"), "attention_mask": split(-1, "image")}},
        attention={"attn1": ("image",), "attn2": LOCAL},
        gather={"proj_out": split(1, "image")},
        required={"encoder_hidden_states": "without text its cross-attention would attend to the split image"},
        patches=patches("image"),
    ),
    "DiTTransformer2DModel": Plan(
        blocks={"transformer_blocks": {"hidden_states": split(1, "image")}},
        gather={"proj_out_2": split(1, "image")},
        patches=patches("image", stages=False),  # the final layer uses the time embedding of block 0
    ),
}
