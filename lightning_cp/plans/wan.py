"""Wan: self-attention over the video, cross-attention on replicated text (and image) tokens.

Per-token timesteps (Wan 2.2 text-and-image to video) are split with the tokens; per-sample timesteps are not. VACE has
a second stack of blocks over control tokens, as many as the video has. The face adapter of Animate attends frame by
frame, so it runs on the whole video.
"""

from lightning_cp.plans.plan import LOCAL, Batch, Plan, Whole, patches, split

_TOKENS = {"hidden_states": split(1, "image"), "rotary_emb": split(1, "image")}
_ATTENTION = {"attn1": ("image",), "attn2": LOCAL}
_EMBEDDERS = ("condition_embedder.text_embedder", "condition_embedder.image_embedder")
_OUTPUT = {"proj_out": split(1, "image")}

_WAN = Plan(
    inputs={"timestep": split(1, "image", ndim=2)},
    blocks={"blocks": {**_TOKENS, "temb": split(1, "image", ndim=4)}},
    attention=_ATTENTION,
    gather=_OUTPUT,
    embeddings={"patch_embedding": "image"},
    patches=patches("image", once=_EMBEDDERS),
)

PLANS = {
    "WanTransformer3DModel": _WAN,
    "ChronoEditTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": Plan(
        blocks={"vace_blocks": {**_TOKENS, "control_hidden_states": split(1, "image")}, "blocks": _TOKENS},
        attention=_ATTENTION,
        gather=_OUTPUT,
        patches=patches("image", stages=False, once=_EMBEDDERS),
        batch=Batch("control_hidden_states_scale", whole=("control_hidden_states_scale",)),  # one for each layer
    ),
    "WanAnimateTransformer3DModel": Plan(
        blocks={"blocks": _TOKENS},
        whole={"face_adapter.*": Whole({"hidden_states": split(1, "image")}, split(1, "image"))},
        attention=_ATTENTION,
        gather=_OUTPUT,
        patches=patches("image", once=(*_EMBEDDERS, "motion_encoder", "face_encoder")),
    ),
}
