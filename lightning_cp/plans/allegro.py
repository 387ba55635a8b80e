"""Allegro: self-attention over the video, cross-attention on replicated text.

The rotary tables of each axis stay whole; the position indices of the tokens are split.
"""

from lightning_cp.plans.plan import LOCAL, Plan, patches, split

PLANS = {
    "AllegroTransformer3DModel": Plan(
        blocks={
            "transformer_blocks": {
                "hidden_states": split(1, "image"),
                "attention_mask": split(-1, "image"),
                "image_rotary_emb": (None, split(-1, "image")),
            }
        },
        attention={"attn1": ("image",), "attn2": LOCAL},
        gather={"proj_out": split(1, "image")},
        patches=patches("image", once=("caption_projection",)),
    )
}
