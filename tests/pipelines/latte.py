"""Latte."""

from __future__ import annotations

from typing import Any

from diffusers import DDIMScheduler, LattePipeline

from tests.models import TINY as MODELS
from tests.pipelines import vaes
from tests.pipelines.text.t5 import t5
from tests.pipelines.tiny import TinyPipe, no_zeros


def _latte() -> LattePipeline:
    tokenizer, text_encoder = t5(width=8)
    return LattePipeline(
        transformer=no_zeros(MODELS["latte"].make().eval()),
        vae=vaes.kl(levels=4),
        scheduler=DDIMScheduler(),
        tokenizer=tokenizer,
        text_encoder=text_encoder,
    )


def _inputs() -> dict[str, Any]:
    """Three frames of 15 patches."""
    return {
        "prompt": "A cat runs.",
        "negative_prompt": "A slow dog, blurred.",
        "clean_caption": False,
        "height": 48,
        "width": 80,
        "video_length": 3,
        "num_inference_steps": 2,
        "guidance_scale": 5.0,
        "output_type": "latent",
    }


TINY = {"latte": TinyPipe(_latte, _inputs, "batch", output="frames")}
