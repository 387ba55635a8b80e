"""FLUX.1, FLUX.2, FLUX.3 and models built like FLUX.1: joint attention of text and image.

The model's arguments are split, so that embedders and position tables run on shards too. In the first blocks of FLUX.3,
text, image and reference images each attend only to themselves.
"""

from dataclasses import replace

from lightning_cp.plans.plan import LOCAL, Attention, Batch, Plan, count, mask, patches, split

INPUTS = {
    "hidden_states": split(1, "image"),
    "encoder_hidden_states": split(1, "text"),
    "img_ids": split(-2, "image"),
    "txt_ids": split(-2, "text"),
}
BATCH = Batch("txt_ids", whole=("img_ids", "txt_ids"))  # models that get a batch of them use the first
MASK = {"attention_mask": mask("text", "image")}
FLUX = Plan(
    inputs={**INPUTS, "joint_attention_kwargs": MASK},
    blocks={"transformer_blocks": {}, "single_transformer_blocks": {}},
    gather={"proj_out": split(1, "image")},
    patches=patches("text", "image"),
    batch=BATCH,
)
_CONTROLNET = {"controlnet_block_samples": split(1, "image"), "controlnet_single_block_samples": split(1, "image")}
_ADAPTER = Attention(("image",), LOCAL)  # attention calls of an IP-Adapter
_PLAIN = ("text", "image")
_CACHE = "it keeps the keys of reference images for later calls"

PLANS = {
    "FluxTransformer2DModel": replace(
        FLUX,
        inputs={**FLUX.inputs, **_CONTROLNET},
        attention={"transformer_blocks.attn": (Attention(("text", "image")), _ADAPTER)},
    ),
    "Flux2Transformer2DModel": replace(
        FLUX,
        inputs={
            "num_ref_tokens": count("reference"),
            **INPUTS,
            "hidden_states": split(1, "reference", "image"),
            "img_ids": split(-2, "reference", "image"),
            "joint_attention_kwargs": MASK,
        },
        # Reference images are image tokens, unless their keys are kept (Klein KV): they then attend to themselves only.
        attention={
            "attn": (
                Attention(("text", "image"), ("text", "reference", "image"), cached=True),
                Attention(("reference",)),
            )
        },
        optional=("reference",),
        needed=("reference",),
        keeps_keys={"kv_cache_mode": _CACHE, "kv_cache": _CACHE},
    ),
    "Flux3Transformer2DModel": Plan(
        inputs={**INPUTS, "image_cond_hidden_states": split(1, "reference"), "image_cond_ids": split(-2, "reference")},
        blocks={
            "txt_mode_blocks": {},
            "mode_blocks.image": {},
            "mode_blocks.image_cond": {},
            "single_transformer_blocks": {},
        },
        attention={
            "txt_mode_blocks.attn": ("text",),
            "mode_blocks.image.attn": ("image",),
            "mode_blocks.image_cond.attn": ("reference",),
            "single_transformer_blocks.attn": ("text", "image", "reference"),
        },
        gather={"proj_out": split(1, "image")},
        needed=("text", "reference"),
        unused=("*image_cond*",),
        patches=patches("text", "image", "reference", stages=False),
        batch=BATCH,
    ),
    "ChromaTransformer2DModel": replace(
        FLUX,
        inputs={**INPUTS, **_CONTROLNET, "attention_mask": split(1, "text", "image")},
        attention={"attn": (Attention(("text", "image"), mask="outer"), _ADAPTER)},
        patches=None,
    ),
    "LongCatImageTransformer2DModel": replace(FLUX, inputs=INPUTS),
    "OvisImageTransformer2DModel": FLUX,
}
