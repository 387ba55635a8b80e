"""GLM-Image: joint attention, with a full mask built from the text mask; prior tokens belong to the image.

Each rank keeps the keys of its shard of the condition images, in the caches that the pipeline gives.
"""

from lightning_cp.plans.plan import Attention, Plan, split

PLANS = {
    "GlmImageTransformer2DModel": Plan(
        blocks={
            "transformer_blocks": {
                "hidden_states": split(1, "image"),
                "encoder_hidden_states": split(1, "text"),
                "image_rotary_emb": split(0, "image"),
                "attention_mask": split(1, "text"),
            }
        },
        attention={"attn1": Attention(("text", "image"), mask="outer", cached=True)},
        gather={"proj_out": split(1, "image")},
        keeps_keys={"kv_caches.caches.0.mode": "it keeps the keys of condition images for the calls of one branch"},
    )
}
