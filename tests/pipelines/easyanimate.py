"""EasyAnimate."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import EasyAnimatePipeline, FlowMatchEulerDiscreteScheduler

from tests.models import TINY as MODELS
from tests.pipelines import vaes_video
from tests.pipelines.text.qwen import qwen25_vl
from tests.pipelines.tiny import TinyPipe, no_zeros


def _easyanimate() -> EasyAnimatePipeline:
    tokenizer, text_encoder = qwen25_vl(layers=3)
    torch.nn.init.normal_(text_encoder.get_input_embeddings().weight)  # so that words differ much
    return EasyAnimatePipeline(
        transformer=no_zeros(MODELS["easyanimate"].make().eval()),
        vae=vaes_video.magvit(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        tokenizer=tokenizer,
        text_encoder=text_encoder,
    )


def _inputs() -> dict[str, Any]:
    """Three latent frames of 15 patches, and 256 tokens for text."""
    return {
        "prompt": "A cat runs.",
        "negative_prompt": "A slow dog, blurred.",
        "height": 48,
        "width": 80,
        "num_frames": 9,
        "num_inference_steps": 2,
        "guidance_scale": 6.0,
        "output_type": "latent",
    }


TINY = {"easyanimate": TinyPipe(_easyanimate, _inputs, "batch", output="frames")}
