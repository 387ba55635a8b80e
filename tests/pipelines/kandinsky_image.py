"""Kandinsky 5: text to image, image to image."""

from __future__ import annotations

from typing import Any

from diffusers import Kandinsky5I2IPipeline, Kandinsky5T2IPipeline

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.common import NEGATIVE, asked, flow_match, loud, picture
from tests.pipelines.text.clip import clip
from tests.pipelines.text.qwen import qwen2_vl_processor, qwen25_vl
from tests.pipelines.tiny import TinyPipe

_LATENTS = 4
_SIZE = (48, 80)  # 3 x 5 tokens: the autoencoder makes it 8 times smaller, and the transformer sees patches of 2 x 2


def _make(pipeline: type) -> Any:
    tokenizer, text_encoder = qwen25_vl(hidden=16)
    tokenizer_2, text_encoder_2 = clip(hidden=8, heads=2)
    transformer = MODELS["kandinsky5"].make(visual_cond=pipeline is Kandinsky5I2IPipeline)
    pipe = pipeline(
        scheduler=flow_match(shift=3.0),
        vae=vaes.kl(_LATENTS, levels=4),
        text_encoder=text_encoder,
        tokenizer=qwen2_vl_processor(tokenizer),
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
        transformer=loud(transformer, gain=1.0),  # larger ones magnify the last bit of float32 too much
    )
    pipe.resolutions = [(_SIZE[1], _SIZE[0])]  # the pipeline's own are of about 1024 x 1024
    return pipe


def _inputs(**others: Any) -> dict[str, Any]:
    return asked(*_SIZE, negative_prompt=NEGATIVE, guidance_scale=4.0, max_sequence_length=61, **others)


TINY = {
    "kandinsky5_t2i": TinyPipe(lambda: _make(Kandinsky5T2IPipeline), _inputs, guidance="calls", output="image"),
    "kandinsky5_i2i": TinyPipe(
        lambda: _make(Kandinsky5I2IPipeline),
        lambda: _inputs(image=picture(*_SIZE)),
        guidance="calls",
        output="image",
    ),
}
