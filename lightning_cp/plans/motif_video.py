"""Motif-Video: joint attention with a mask over [video | picture | text], and cross-attention of the video to the text.

Decoder layers start again from the embedded video and attend to [decoder | encoder] tokens, both of the video.
"""

from lightning_cp.plans.plan import Attention, Pad, Plan, Spec, count, split

_ENCODER: dict[str, Spec] = {
    "image_embed_seq_len": count("picture"),
    "encoder_hidden_states": split(1, "picture", "text"),
    "hidden_states": split(1, "image"),
    "attention_mask": split(3, "image", "picture", "text"),
    "image_rotary_emb": split(0, "image"),
}
_DECODER: dict[str, Spec] = {
    "hidden_states": split(1, "image"),
    "encoder_hidden_states": split(1, "image"),
    "image_rotary_emb": split(0, "image"),
}

PLANS = {
    "MotifVideoTransformer3DModel": Plan(
        blocks={
            "transformer_blocks": _ENCODER,
            "single_transformer_blocks[:-num_decoder_layers]": _ENCODER,
            "single_transformer_blocks[-num_decoder_layers:]": _DECODER,
        },
        attention={
            "cross_attn": Attention(("image",), ("text",)),
            "single_transformer_blocks[-num_decoder_layers:].attn": ("image", "image"),
        },
        gather={"proj_out": split(1, "image")},
        pads=(Pad("encoder_hidden_states", "encoder_attention_mask"),),
    )
}
