"""CogVideoX: joint attention, rotary positions for the video only."""

from lightning_cp.plans.plan import Plan, split

PLANS = {
    "CogVideoXTransformer3DModel": Plan(
        blocks={
            "transformer_blocks": {
                "hidden_states": split(1, "image"),
                "encoder_hidden_states": split(1, "text"),
                "image_rotary_emb": split(0, "image"),
            },
        },
        gather={"proj_out": split(1, "image")},
    ),
}
