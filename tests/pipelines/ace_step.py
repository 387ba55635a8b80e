"""ACE-Step."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AceStepPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ace_step import AceStepConditionEncoder

from tests.models import TINY as MODELS
from tests.pipelines import vaes_audio
from tests.pipelines.text.qwen import qwen3
from tests.pipelines.tiny import TinyPipe, no_zeros

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 5,
}


def _ace_step() -> AceStepPipeline:
    tokenizer, text_encoder = qwen3(hidden=32)
    torch.nn.init.normal_(text_encoder.get_input_embeddings().weight)  # so that words differ much
    transformer = MODELS["ace_step"].make(encoder_hidden_size=None)
    conditions = AceStepConditionEncoder(
        **_SIZES,
        text_hidden_dim=32,
        timbre_hidden_dim=4,
        num_lyric_encoder_hidden_layers=2,
        num_timbre_encoder_hidden_layers=2,
    )
    return AceStepPipeline(
        transformer=no_zeros(transformer.eval()),
        condition_encoder=no_zeros(conditions.eval()),
        vae=vaes_audio.oobleck(rate=100),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
        tokenizer=tokenizer,
        text_encoder=text_encoder,
    )


def _inputs() -> dict[str, Any]:
    """17 tokens of sound; the branch without a prompt has the model's own condition."""
    return {
        "prompt": "A cat sings.",
        "lyrics": "Soft notes",
        "audio_duration": 0.66,
        "num_inference_steps": 2,
        "guidance_scale": 6.0,
        "max_lyric_length": 64,
        "output_type": "latent",
    }


TINY = {"ace_step": TinyPipe(_ace_step, _inputs, "batch", output="audios")}
