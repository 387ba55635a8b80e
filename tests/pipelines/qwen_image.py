"""QwenImage: text to image, image to image, inpainting, and the two pipelines that edit."""

from __future__ import annotations

from typing import Any

from diffusers import (
    QwenImageControlNetModel,
    QwenImageControlNetPipeline,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImageImg2ImgPipeline,
    QwenImageInpaintPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, NEGATIVES, PROMPTS, asked, flow_match, loud, mask, picture
from tests.pipelines.text.qwen import qwen2_vl_processor, qwen25_vl
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (24, 40)  # 3 x 5 tokens: the autoencoder makes it 4 times smaller, and the transformer sees patches of 2 x 2
# The pipelines that edit make images as large as 1024 x 1024 for their autoencoder: 3 x 5 tokens if it halves 7 times.
_EDIT_LEVELS, _EDIT_SIZE, _IMAGE_SIZE = 7, (768, 1280), (20, 12)


def _make(pipeline: type, *, edit: bool = False) -> Any:
    tokenizer, text_encoder = qwen25_vl(hidden=16)
    others = {"processor": qwen2_vl_processor(tokenizer)} if edit else {}
    sizes: dict[str, Any] = {
        "patch_size": 2,
        "in_channels": 4 * _LATENTS,
        "out_channels": _LATENTS,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": 16,
        "axes_dims_rope": (8, 4, 4),
    }
    transformer = QwenImageTransformer2DModel(**sizes, num_layers=2)
    if pipeline is QwenImageControlNetPipeline:
        others["controlnet"] = loud(QwenImageControlNetModel(**sizes, num_layers=1))
    return pipeline(
        scheduler=flow_match(),
        vae=vaes.qwen_image(_LATENTS, levels=_EDIT_LEVELS if edit else 2, blocks=0 if edit else 1),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=loud(transformer),
        **others,
    )


def _inputs(size: tuple[int, int] = _SIZE, **others: Any) -> dict[str, Any]:
    return asked(*size, **{"negative_prompt": NEGATIVE, "true_cfg_scale": 3.0, **others})


TINY = {
    "qwen_image": TinyPipe(lambda: _make(QwenImagePipeline), _inputs, guidance="calls"),
    "qwen_image_two_prompts": TinyPipe(  # of two lengths: with a mask for the text
        lambda: _make(QwenImagePipeline),
        lambda: _inputs(prompt=PROMPTS, negative_prompt=NEGATIVES),
        guidance="calls",
    ),
    "qwen_image_img2img": TinyPipe(
        lambda: _make(QwenImageImg2ImgPipeline),
        lambda: _inputs(image=picture(*_SIZE), strength=0.5, num_inference_steps=4),
        guidance="calls",
    ),
    "qwen_image_inpaint": TinyPipe(
        lambda: _make(QwenImageInpaintPipeline),
        lambda: _inputs(image=picture(*_SIZE), mask_image=mask(*_SIZE), strength=0.5, num_inference_steps=4),
        guidance="calls",
    ),
    "qwen_image_controlnet": TinyPipe(
        lambda: _make(QwenImageControlNetPipeline),
        lambda: _inputs(control_image=picture(*_SIZE), controlnet_conditioning_scale=0.7),
        guidance="calls",
        controlnets=("controlnet",),
    ),
    "qwen_image_edit": TinyPipe(
        lambda: _make(QwenImageEditPipeline, edit=True),
        lambda: _inputs(_EDIT_SIZE, image=picture(*_IMAGE_SIZE)),
        guidance="calls",
    ),
    "qwen_image_edit_plus": TinyPipe(
        lambda: _make(QwenImageEditPlusPipeline, edit=True),
        lambda: _inputs(_EDIT_SIZE, image=[picture(*_IMAGE_SIZE), picture(*reversed(_IMAGE_SIZE), seed=1)]),
        guidance="calls",
    ),
}
