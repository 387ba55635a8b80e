"""QwenImage: joint attention with a text mask; separate position tables for image and text."""

from lightning_cp.plans.plan import Pad, Plan, patches, split

PLANS = {
    "QwenImageTransformer2DModel": Plan(
        inputs={"hidden_states": split(1, "image"), "controlnet_block_samples": split(1, "image")},
        blocks={
            "transformer_blocks": {
                "hidden_states": split(1, "image"),
                "encoder_hidden_states": split(1, "text"),
                "encoder_hidden_states_mask": split(1, "text"),
                "image_rotary_emb": (split(0, "image"), split(0, "text")),
                "modulate_index": split(1, "image"),
            }
        },
        gather={"proj_out": split(1, "image")},
        pads=(Pad("encoder_hidden_states", "encoder_hidden_states_mask"),),
        unused=("transformer_blocks.-1.*",),
        patches=patches("text", "image"),
    )
}
