"""LTX-2: video and audio attend to themselves, to each other, and to replicated, masked text.

The model's arguments are split, so that per-token timesteps are embedded on shards. The SANA-WM refiner is the video
part of LTX-2; it has audio parameters but never uses them.
"""

from lightning_cp.plans.plan import LOCAL, Attention, Plan, mask, patches, split

_VIDEO = {"hidden_states": split(1, "image"), "video_rotary_emb": split(-2, "image")}
_CACHE = "it holds all keys of earlier frames on every rank, next to a shard of this window's keys"

PLANS = {
    "LTX2VideoTransformer3DModel": Plan(
        inputs={
            "hidden_states": split(1, "image"),
            "audio_hidden_states": split(1, "audio"),
            "timestep": split(1, "image", ndim=(2, 3)),
            "audio_timestep": split(1, "audio", ndim=(2, 3)),
            "video_keyframes_mask": split(1, "image"),
        },
        blocks={
            "transformer_blocks": {
                **_VIDEO,
                "audio_hidden_states": split(1, "audio"),
                "audio_rotary_emb": split(-2, "audio"),
                "ca_video_rotary_emb": split(-2, "image"),
                "ca_audio_rotary_emb": split(-2, "audio"),
                "self_attention_mask": mask("image"),
            }
        },
        attention={
            "attn1": Attention(("image",), mask="padded"),
            "audio_attn1": ("audio",),
            "audio_to_video_attn": Attention(("image",), ("audio",)),
            "video_to_audio_attn": Attention(("audio",), ("image",)),
            "attn2": LOCAL,
            "audio_attn2": LOCAL,
        },
        gather={"proj_out": split(1, "image"), "audio_proj_out": split(1, "audio")},
        needed=("audio",),
        unused=("av_cross_attn_*", "transformer_blocks.*"),
        patches=patches("image", "audio"),
    ),
    "SanaWMLTX2RefinerTransformer3DModel": Plan(
        inputs={"hidden_states": split(1, "image"), "timestep": split(1, "image", ndim=(2, 3))},
        blocks={"transformer_blocks": _VIDEO},
        attention={"attn1": ("image",), "attn2": LOCAL},
        gather={"proj_out": split(1, "image")},
        unused=(
            "audio_*",
            "av_cross_attn_*",
            "prompt_adaln.*",
            "keyframes_abs_pos_embedding",
            "transformer_blocks.*.audio_*",
            "transformer_blocks.*.video_*",
            "transformer_blocks.*.prompt_scale_shift_table",
        ),
        refused={"kv_cache": _CACHE, "kv_cache_mode": _CACHE},
        patches=patches("image"),
    ),
}
