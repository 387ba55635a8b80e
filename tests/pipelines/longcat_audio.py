"""LongCat-AudioDiT."""

from __future__ import annotations

from typing import Any

from diffusers import LongCatAudioDiTPipeline

from tests.models import TINY as MODELS
from tests.pipelines import vaes_audio
from tests.pipelines.text.t5 import umt5
from tests.pipelines.tiny import TinyPipe, no_zeros


def _longcat() -> LongCatAudioDiTPipeline:
    tokenizer, text_encoder = umt5()
    return LongCatAudioDiTPipeline(
        transformer=no_zeros(MODELS["longcat_audio"].make().eval()),
        vae=vaes_audio.longcat(),
        tokenizer=tokenizer,
        text_encoder=text_encoder,
    )


def _inputs() -> dict[str, Any]:
    """17 tokens of sound."""
    return {
        "prompt": "A cat runs.",
        "negative_prompt": "A slow dog, blurred.",
        "audio_duration_s": 0.35,
        "num_inference_steps": 2,
        "guidance_scale": 4.0,
        "output_type": "latent",
    }


TINY = {"longcat_audio": TinyPipe(_longcat, _inputs, "calls", output="audios")}
