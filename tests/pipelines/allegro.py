"""Allegro."""

from __future__ import annotations

from typing import Any

from diffusers import AllegroPipeline, DDIMScheduler

from tests.models import TINY as MODELS
from tests.pipelines import vaes_video
from tests.pipelines.text.t5 import t5
from tests.pipelines.tiny import TinyPipe, no_zeros


def _allegro() -> AllegroPipeline:
    tokenizer, text_encoder = t5(width=8)
    return AllegroPipeline(
        transformer=no_zeros(MODELS["allegro"].make().eval()),
        vae=vaes_video.allegro(),
        scheduler=DDIMScheduler(),
        tokenizer=tokenizer,
        text_encoder=text_encoder,
    )


def _inputs() -> dict[str, Any]:
    """Three latent frames of 15 patches."""
    return {
        "prompt": "A cat runs.",
        "negative_prompt": "A slow dog, blurred.",
        "clean_caption": False,
        "max_sequence_length": 24,
        "height": 48,
        "width": 80,
        "num_frames": 12,
        "num_inference_steps": 2,
        "guidance_scale": 6.0,
        "output_type": "latent",
    }


TINY = {"allegro": TinyPipe(_allegro, _inputs, "batch", output="frames")}
