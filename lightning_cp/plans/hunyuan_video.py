"""HunyuanVideo: joint attention with a mask over [video | text]; the text refiner runs on the whole text.

With `token_replace` the first frame's tokens have separate modulation, so they are a separate modality. FramePack puts
history before the video and drops it after the last block. HunyuanVideo 1.5 builds its mask from per-token values.
"""

from lightning_cp.plans.plan import Attention, Pad, Plan, Spec, count, patches, split

_EMBEDDINGS = {"x_embedder.proj": "image"}
_REFINER = ("context_embedder",)
_TEXT = (Pad("encoder_hidden_states", "encoder_attention_mask"),)


def _blocks(*video: str, **more: Spec) -> dict[str, dict[str, Spec]]:
    """Return the `blocks` of a plan for the modalities `video` and text; arguments in `more` are listed first."""
    arguments = {
        **more,
        "hidden_states": split(1, *video),
        "encoder_hidden_states": split(1, "text"),
        "attention_mask": split(3, *video, "text"),
    }
    return {
        "transformer_blocks": {**arguments, "freqs_cis": split(0, *video)},
        "single_transformer_blocks": {**arguments, "image_rotary_emb": split(0, *video)},
    }


PLANS = {
    "HunyuanVideoTransformer3DModel": Plan(
        blocks=_blocks("image"),
        gather={"proj_out": split(1, "image")},
        embeddings=_EMBEDDINGS,
        pads=_TEXT,
        variants={
            ("image_condition_type", "token_replace"): Plan(
                blocks=_blocks("first_frame", "image", num_tokens=count("first_frame")),
                gather={"proj_out": split(1, "first_frame", "image")},
                pads=_TEXT,
                patches=patches("first_frame", "image", "text", once=_REFINER),
            )
        },
        patches=patches("image", "text", once=_REFINER),
    ),
    "HunyuanVideoFramepackTransformer3DModel": Plan(
        blocks=_blocks("image"),
        gather={"single_transformer_blocks.-1": (split(1, "image"), None)},
        needed=("text",),
        pads=_TEXT,
        patches=patches("image", "text", once=_REFINER, masks=("encoder_attention_mask",)),
    ),
    "HunyuanVideo15Transformer3DModel": Plan(
        blocks={
            "transformer_blocks": {
                "hidden_states": split(1, "image"),
                "encoder_hidden_states": split(1, "text"),
                "attention_mask": split(1, "text"),
                "freqs_cis": split(0, "image"),
            }
        },
        attention={"attn": Attention(("image", "text"), mask="outer")},
        gather={"proj_out": split(1, "image")},
        embeddings=_EMBEDDINGS,
        pads=_TEXT,
        unused=("transformer_blocks.-1.attn.to_add_out.*", "transformer_blocks.-1.ff_context.*"),
    ),
}
