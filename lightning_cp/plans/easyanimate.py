"""EasyAnimate: joint attention over [text | video] without a mask; rotary positions for the video only."""

from lightning_cp.plans.plan import Plan, patches, split

PLANS = {
    "EasyAnimateTransformer3DModel": Plan(
        blocks={
            "transformer_blocks": {
                "hidden_states": split(1, "image"),
                "encoder_hidden_states": split(1, "text"),
                "image_rotary_emb": split(0, "image"),
            }
        },
        gather={"proj_out": split(1, "image")},
        unused=("transformer_blocks.-1.attn1.to_add_out.*", "transformer_blocks.-1.txt_ff.*"),
        patches=patches("text", "image"),
    )
}
