"""CogVideoX and ConsisID: joint attention, rotary positions for the video only.

ConsisID adds cross-attention of the video to face tokens between the blocks; it needs no communication.
"""

from lightning_cp.plans.plan import Plan, patches, split

_ARGUMENTS = {
    "hidden_states": split(1, "image"),
    "encoder_hidden_states": split(1, "text"),
    "image_rotary_emb": split(0, "image"),
}

PLANS = {
    "CogVideoXTransformer3DModel": Plan(
        blocks={
            "transformer_blocks": {**_ARGUMENTS, "attention_kwargs": {"attention_mask": split(-1, "text", "image")}}
        },
        gather={"proj_out": split(1, "image")},
        patches=patches("text", "image"),
    ),
    "ConsisIDTransformer3DModel": Plan(
        blocks={"transformer_blocks": _ARGUMENTS},
        gather={"norm_final": split(1, "text", "image")},  # the model then drops the text by its global length
        patches=patches("text", "image", once=("local_facial_extractor",)),
    ),
}
