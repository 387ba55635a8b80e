"""HunyuanImage 2.1: with guidance, and the distilled model with mean flows."""

from __future__ import annotations

from typing import Any

from diffusers import AdaptiveProjectedMixGuidance, HunyuanImagePipeline

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, PROMPT, asked, flow_match, loud
from tests.pipelines.text.byt5 import byt5
from tests.pipelines.text.qwen import qwen25_vl
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (24, 40)  # 3 x 5 tokens: the autoencoder makes it 8 times smaller
_GLYPHS = 'a sign that says "open"'


def _make(*, distilled: bool = False) -> Any:
    tokenizer, text_encoder = qwen25_vl(hidden=16, layers=3)
    tokenizer_2, text_encoder_2 = byt5(width=8)
    guiders = {}
    if not distilled:
        guiders["guider"] = AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=0)
        guiders["ocr_guider"] = AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=1)
    transformer = MODELS["hunyuan_image"].make(guidance_embeds=distilled, use_meanflow=distilled)
    pipe = HunyuanImagePipeline(
        scheduler=flow_match(shift=5.0),
        vae=vaes.hunyuan_image(_LATENTS),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
        transformer=loud(transformer),
        **guiders,
    )
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length = 37, 21  # its texts are padded to 1000 and 128 else
    return pipe


def _inputs(prompt: str) -> dict[str, Any]:
    return asked(*_SIZE, prompt=prompt, negative_prompt=NEGATIVE)


TINY = {
    "hunyuan_image": TinyPipe(_make, lambda: _inputs(PROMPT), guidance="calls"),
    "hunyuan_image_glyphs": TinyPipe(_make, lambda: _inputs(_GLYPHS), guidance="calls"),
    "hunyuan_image_distilled": TinyPipe(
        lambda: _make(distilled=True),
        lambda: asked(*_SIZE, prompt=_GLYPHS, distilled_guidance_scale=3.25),
        guidance="none",
    ),
}
