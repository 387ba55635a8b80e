"""Mochi: joint attention, one sample at a time, after dropping the padding of the sample's text."""

from lightning_cp.plans.plan import Attention, Plan, split

PLANS = {
    "MochiTransformer3DModel": Plan(
        blocks={
            "transformer_blocks": {
                "hidden_states": split(1, "image"),
                "encoder_hidden_states": split(1, "text"),
                "encoder_attention_mask": split(1, "text"),
                "image_rotary_emb": split(0, "image"),
            }
        },
        attention={"attn1": Attention(("image", "text"), ragged=True)},
        gather={"proj_out": split(1, "image")},
        leading={"encoder_attention_mask": "attention moves the tokens that it keeps to the front"},
    )
}
