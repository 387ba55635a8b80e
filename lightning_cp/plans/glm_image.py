"""GLM-Image: joint attention, with a full mask built from the text mask; prior tokens belong to the image."""

from lightning_cp.plans.plan import Attention, Plan, split

PLANS = {
    "GlmImageTransformer2DModel": Plan(
        blocks={
            "transformer_blocks": {
                "hidden_states": split(1, "image"),
                "encoder_hidden_states": split(1, "text"),
                "image_rotary_emb": split(0, "image"),
                "attention_mask": split(1, "text"),
            },
        },
        attention={"attn1": Attention(("text", "image"), mask="outer")},
        gather={"proj_out": split(1, "image")},
        refused={"kv_cache.mode": "it would keep this rank's keys of the condition images only"},
    ),
}
