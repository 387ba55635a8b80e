"""Sana and SanaVideo: linear attention (a sum over all tokens), cross-attention on replicated text, and convolutions.

Images are split between rows and videos between frames; convolutions exchange halos with neighbouring shards.
"""

from lightning_cp.plans.plan import LOCAL, Attention, Plan, patches, rows, split

_SELF = Attention(
    ("image",), form="linear", replaces_processors=("SanaLinearAttnProcessor2_0", "SanaLinearAttnProcessor3_0")
)
PLANS = {
    "SanaTransformer2DModel": Plan(
        inputs={"hidden_states": rows("image", 2, per="patch_size"), "controlnet_block_samples": split(1, "image")},
        blocks={"transformer_blocks": {"height": rows("image"), "hidden_states": split(1, "image")}},
        halos={"transformer_blocks.*.ff.conv_depth": (2, "image")},
        attention={"attn1": _SELF, "attn2": LOCAL},
        gather={"proj_out": split(1, "image")},
        patches=patches("image"),
    ),
    "SanaVideoTransformer3DModel": Plan(
        inputs={"hidden_states": rows("image", 2, per="patch_size"), "controlnet_block_samples": split(1, "image")},
        blocks={
            "transformer_blocks": {
                "frames": rows("image"),
                "hidden_states": split(1, "image"),
                "timestep": split(1, "image"),
                "rotary_emb": split(1, "image"),
            }
        },
        halos={"transformer_blocks.*.ff.conv_temp": (2, "image")},
        attention={"attn1": _SELF, "attn2": LOCAL},
        arguments={"norm_out": {"temb": split(1, "image")}},
        gather={"proj_out": split(1, "image")},
        patches=patches("image"),
    ),
}
