"""Motif-Video."""

from __future__ import annotations

from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    MotifVideoImage2VideoPipeline,
    MotifVideoPipeline,
)
from diffusers.guiders import AdaptiveProjectedGuidance, BaseGuidance, ClassifierFreeGuidance
from transformers import SiglipImageProcessor, SiglipVisionConfig
from transformers.models.t5gemma2 import T5Gemma2EncoderConfig, T5Gemma2TextConfig
from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2Encoder

from tests.models import TINY as MODELS
from tests.pipelines import vaes_video
from tests.pipelines.media import image
from tests.pipelines.text.t5 import tokenizer
from tests.pipelines.tiny import TinyPipe, no_zeros


def _text_encoder(size: int) -> T5Gemma2Encoder:
    """Its encoder of images takes pictures of 8 x 8, 4 tokens each."""
    text = T5Gemma2TextConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=32,
        vocab_size=size,
        max_position_embeddings=128,
        dropout_rate=0.0,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.2,
    )
    vision = SiglipVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    return T5Gemma2Encoder(T5Gemma2EncoderConfig(text_config=text, vision_config=vision, mm_tokens_per_image=4)).eval()


def _components(guider: BaseGuidance) -> dict[str, Any]:
    transformer = MODELS["motif_video"].make(in_channels=9, patch_size=2)
    words = tokenizer()
    return {
        "transformer": no_zeros(transformer.eval()),
        "vae": vaes_video.wan(),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0),
        "tokenizer": words,
        "text_encoder": _text_encoder(len(words)),
        "guider": guider,
    }


def _text_to_video() -> MotifVideoPipeline:
    return MotifVideoPipeline(**_components(ClassifierFreeGuidance(guidance_scale=5.0)))


def _projected() -> MotifVideoPipeline:
    return MotifVideoPipeline(
        **_components(
            AdaptiveProjectedGuidance(
                guidance_scale=5.0,
                adaptive_projected_guidance_momentum=-0.5,
                adaptive_projected_guidance_rescale=2.0,
                eta=0.0,
            )
        )
    )


def _image_to_video() -> MotifVideoImage2VideoPipeline:
    return MotifVideoImage2VideoPipeline(
        feature_extractor=SiglipImageProcessor(size={"height": 8, "width": 8}),
        **_components(ClassifierFreeGuidance(guidance_scale=5.0)),
    )


def _inputs() -> dict[str, Any]:
    """Three latent frames of 15 patches."""
    return {
        "prompt": "A cat runs.",
        "negative_prompt": "A slow dog, blurred.",
        "max_sequence_length": 24,
        "height": 48,
        "width": 80,
        "num_frames": 9,
        "num_inference_steps": 2,
        "output_type": "latent",
    }


def _image_to_video_inputs() -> dict[str, Any]:
    return {**_inputs(), "image": image(48, 80)}


TINY = {
    "motif_video": TinyPipe(_text_to_video, _inputs, "calls", output="frames"),
    "motif_video_projected": TinyPipe(_projected, _inputs, "calls", output="frames"),
    "motif_video_image_to_video": TinyPipe(_image_to_video, _image_to_video_inputs, "calls", output="frames"),
}
