"""HunyuanImage: joint attention with a mask over [image | text]; the text refiner runs on the whole text."""

from lightning_cp.plans.plan import Pad, Plan, patches, split

_ARGUMENTS = {
    "hidden_states": split(1, "image"),
    "encoder_hidden_states": split(1, "text"),
    "attention_mask": split(3, "image", "text"),
    "image_rotary_emb": split(0, "image"),
}

PLANS = {
    "HunyuanImageTransformer2DModel": Plan(
        blocks={"transformer_blocks": _ARGUMENTS, "single_transformer_blocks": _ARGUMENTS},
        gather={"proj_out": split(1, "image")},
        pads=(Pad("encoder_hidden_states", "encoder_attention_mask"),),
        patches=patches("image", "text", once=("context_embedder",)),
    )
}
