"""Kandinsky 5 and 6: self-attention over the video, cross-attention on replicated text. Text blocks get whole tokens.

Kandinsky 6 also has an audio modality; video and audio attend to each other. With NABLA (`sparse_params`), the mask has
a row for each block of 64 tokens, and ranks hold whole blocks (`engine/attention/chosen_blocks.py`).
"""

from lightning_cp.plans.plan import LOCAL, Attention, Plan, patches, rows, split

_NABLA = {"sparse_params": {"sta_mask": rows("image", -1)}}

PLANS = {
    "Kandinsky5Transformer3DModel": Plan(
        blocks={"visual_transformer_blocks": {**_NABLA, "visual_embed": split(1, "image"), "rope": split(1, "image")}},
        attention={"self_attention": ("image",), "cross_attention": LOCAL},
        gather={"visual_transformer_blocks.-1": split(1, "image")},
        patches=patches("image"),
    ),
    "Kandinsky6Transformer3DModel": Plan(
        blocks={
            "visual_transformer_blocks": {
                "vis": split(1, "image"),
                "aud": split(1, "audio"),
                "vis_rope": split(0, "image"),
                "aud_rope": split(0, "audio"),
            }
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
    "Kandinsky6SRTransformer3DModel": Plan(
        blocks={
            "visual_transformer_blocks": {**_NABLA, "hidden_states": split(1, "image"), "rotary_emb": split(0, "image")}
        },
        attention={"self_attention": ("image",)},
        gather={"visual_transformer_blocks.-1": split(1, "image")},
    ),
}
