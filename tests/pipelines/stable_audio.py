"""Stable Audio 1 and 3."""

from __future__ import annotations

from typing import Any

from diffusers import (
    EDMDPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    StableAudio3Pipeline,
    StableAudioPipeline,
)
from diffusers.pipelines.stable_audio import StableAudioProjectionModel
from diffusers.pipelines.stable_audio_3 import StableAudio3DurationEmbedder
from transformers import T5GemmaConfig, T5GemmaEncoderModel, T5GemmaModuleConfig

from tests.models import TINY as MODELS
from tests.pipelines import vaes_audio
from tests.pipelines.text.t5 import t5, tokenizer
from tests.pipelines.tiny import TinyPipe, no_zeros


def _first() -> StableAudioPipeline:
    words, text_encoder = t5(max_length=24)
    transformer = MODELS["stable_audio"].make(global_states_input_dim=32, sample_size=18)
    projection = StableAudioProjectionModel(text_encoder_dim=16, conditioning_dim=16, min_value=0, max_value=32)
    return StableAudioPipeline(
        transformer=no_zeros(transformer.eval()),
        vae=vaes_audio.oobleck(),
        scheduler=EDMDPMSolverMultistepScheduler(prediction_type="v_prediction", sigma_data=1.0),
        tokenizer=words,
        text_encoder=text_encoder,
        projection_model=projection.eval(),
    )


def _inputs() -> dict[str, Any]:
    """18 tokens of sound, and one of global conditions."""
    return {
        "prompt": "A cat runs.",
        "negative_prompt": "A slow dog, blurred.",
        "audio_end_in_s": 8.0,
        "num_inference_steps": 2,
        "guidance_scale": 6.0,
        "output_type": "latent",
    }


def _third() -> StableAudio3Pipeline:
    words = tokenizer()
    module = T5GemmaModuleConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        sliding_window=64,
        layer_types=["full_attention"],
        initializer_range=0.2,
    )
    config = T5GemmaConfig(encoder=module.to_dict(), decoder=module.to_dict(), is_encoder_decoder=False)
    transformer = MODELS["stable_audio3"].make(global_cond_dim=16)
    return StableAudio3Pipeline(
        transformer=no_zeros(transformer.eval()),
        vae=vaes_audio.same(),
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
        tokenizer=words,
        text_encoder=T5GemmaEncoderModel(config).eval(),
        duration_embedder=StableAudio3DurationEmbedder(output_dim=16, fourier_dim=16).eval(),
    )


def _third_inputs() -> dict[str, Any]:
    """17 tokens of sound."""
    inputs = {**_inputs(), "duration": 4.25}
    del inputs["audio_end_in_s"]
    return inputs


TINY = {
    "stable_audio": TinyPipe(_first, _inputs, "batch", output="audios"),
    "stable_audio3": TinyPipe(_third, _third_inputs, "batch", output="audios"),
}
