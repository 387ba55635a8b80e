"""HunyuanVideo: joint attention with a mask over [video | text]; the text refiner stays whole, outside the blocks."""

from lightning_cp.plans.plan import Pad, Plan, split

_ARGUMENTS = {
    "hidden_states": split(1, "image"),
    "encoder_hidden_states": split(1, "text"),
    "attention_mask": split(3, "image", "text"),
}

PLANS = {
    "HunyuanVideoTransformer3DModel": Plan(
        blocks={
            "transformer_blocks": {**_ARGUMENTS, "freqs_cis": split(0, "image")},
            "single_transformer_blocks": {**_ARGUMENTS, "image_rotary_emb": split(0, "image")},
        },
        gather={"proj_out": split(1, "image")},
        pads=(Pad("encoder_hidden_states", "encoder_attention_mask"),),
        refused={"token_replace_emb": "token_replace modulates the first frame's tokens by their global index"},
    ),
}
