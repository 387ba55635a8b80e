"""LongCat-Image: text to image, and editing."""

from __future__ import annotations

from typing import Any

from diffusers import LongCatImageEditPipeline, LongCatImagePipeline

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, flow_match, loud, picture
from tests.pipelines.text.qwen import qwen2_vl_processor, qwen25_vl
from tests.pipelines.tiny import TinyPipe

_LATENTS = 16
_SIZE = (12, 20)  # 3 x 5 tokens: the autoencoder halves both, and the transformer sees patches of 2 x 2


def _make(pipeline: type) -> Any:
    edit = pipeline is LongCatImageEditPipeline
    tokenizer, text_encoder = qwen25_vl(hidden=16)
    transformer = MODELS["longcat_image"].make(
        in_channels=4 * _LATENTS, joint_attention_dim=16, pooled_projection_dim=16
    )
    pipe = pipeline(
        scheduler=flow_match(),
        # Images to be edited are made as large as 1024 x 1024: 3 x 5 tokens, halved 7 times.
        vae=vaes.kl(_LATENTS, levels=8 if edit else 2),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_processor=qwen2_vl_processor(tokenizer),
        transformer=loud(transformer),
    )
    pipe.tokenizer_max_length = 37  # its texts are padded to 512 else
    return pipe


def _edit() -> dict[str, Any]:
    """Without a size: it follows from the image."""
    arguments = asked(0, 0, negative_prompt=NEGATIVE, guidance_scale=4.5, image=picture(20, 12))
    return {name: value for name, value in arguments.items() if name not in ("height", "width")}


TINY = {
    "longcat_image": TinyPipe(
        lambda: _make(LongCatImagePipeline),
        lambda: asked(*_SIZE, negative_prompt=NEGATIVE, guidance_scale=4.5, enable_prompt_rewrite=False),
        guidance="calls",
    ),
    "longcat_image_edit": TinyPipe(lambda: _make(LongCatImageEditPipeline), _edit, guidance="calls"),
}
