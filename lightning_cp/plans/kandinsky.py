"""Kandinsky 5 and 6: self-attention over the video, cross-attention on replicated text. Text blocks get whole tokens.

Kandinsky 6 also has an audio modality; video and audio attend to each other.
"""

from lightning_cp.plans.plan import LOCAL, Attention, Plan, patches, split

_NABLA = "NABLA attention picks blocks of keys by means over the whole video"

PLANS = {
    "Kandinsky5Transformer3DModel": Plan(
        blocks={"visual_transformer_blocks": {"visual_embed": split(1, "image"), "rope": split(1, "image")}},
        attention={"self_attention": ("image",), "cross_attention": LOCAL},
        gather={"visual_transformer_blocks.-1": split(1, "image")},
        refused={"sparse_params": _NABLA},
        patches=patches("image"),
    ),
    "Kandinsky6Transformer3DModel": Plan(
        blocks={
            "visual_transformer_blocks": {
                "vis": split(1, "image"),
                "aud": split(1, "audio"),
                "vis_rope": split(0, "image"),
                "aud_rope": split(0, "audio"),
            },
        },
        attention={
            "video_dec_block.self_attention": ("image",),
            "audio_dec_block.self_attention": ("audio",),
            "*_dec_block.cross_attention": LOCAL,
            "va_cross_attention": Attention(("image",), ("audio",)),
            "av_cross_attention": Attention(("audio",), ("image",)),
        },
        gather={"visual_transformer_blocks.-1": (split(1, "image"), split(1, "audio"))},
        needed=("audio",),
        unused=(
            "*audio*",
            "visual_transformer_blocks.*.*_cross_attention.*",
            "visual_transformer_blocks.*.*_modulation.*",
        ),
        patches=patches("image", "audio"),
    ),
}
