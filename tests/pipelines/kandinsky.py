"""Kandinsky 5 and 6."""

from __future__ import annotations

from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    Kandinsky5I2VPipeline,
    Kandinsky5T2VPipeline,
    Kandinsky6TI2VAPipeline,
)

from tests.models import TINY as MODELS
from tests.pipelines import vaes_audio, vaes_video
from tests.pipelines.media import image
from tests.pipelines.text.clip import clip
from tests.pipelines.text.qwen import qwen2_vl_processor, qwen25_vl
from tests.pipelines.tiny import TinyPipe, no_zeros

_TEMPLATE = "<|im_start|>system\nDescribe the video:<|im_end|>\n<|im_start|>user\n"


def _kandinsky(kind: type, **config: Any) -> Any:
    tokenizer, text_encoder = qwen25_vl()
    tokenizer_2, text_encoder_2 = clip(hidden=8)
    pipe = kind(
        transformer=no_zeros(MODELS["kandinsky5"].make(**config).eval()),
        vae=vaes_video.hunyuan_video(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        tokenizer=qwen2_vl_processor(tokenizer),
        text_encoder=text_encoder,
        tokenizer_2=tokenizer_2,
        text_encoder_2=text_encoder_2,
    )
    # a template of a few tokens
    pipe.prompt_template = _TEMPLATE + "{}<|im_end|>"
    pipe.prompt_template_encode_start_idx = len(tokenizer(_TEMPLATE).input_ids)
    return pipe


def _text_to_video() -> Kandinsky5T2VPipeline:
    return _kandinsky(Kandinsky5T2VPipeline)


def _image_to_video() -> Kandinsky5I2VPipeline:
    return _kandinsky(Kandinsky5I2VPipeline, visual_cond=True)


def _kandinsky6() -> Kandinsky6TI2VAPipeline:
    tokenizer, text_encoder = qwen25_vl()
    tokenizer_2, text_encoder_2 = clip(hidden=8)
    transformer = MODELS["kandinsky6"].make(visual_cond=True, visual_token_type_num_embeddings=2)
    return Kandinsky6TI2VAPipeline(
        transformer=no_zeros(transformer.eval()),
        vae=vaes_video.hunyuan_video(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        tokenizer=qwen2_vl_processor(tokenizer),
        text_encoder=text_encoder,
        tokenizer_2=tokenizer_2,
        text_encoder_2=text_encoder_2,
        audio_vae=vaes_audio.mmaudio(6),
        vocoder=vaes_audio.mmaudio_vocoder(),
    )


def _inputs() -> dict[str, Any]:
    """Three latent frames of 15 patches."""
    return {
        "prompt": "A cat runs.",
        "negative_prompt": "A slow dog, blurred.",
        "max_sequence_length": 32,
        "height": 48,
        "width": 80,
        "num_frames": 9,
        "num_inference_steps": 2,
        "guidance_scale": 4.0,
        "output_type": "latent",
    }


def _image_to_video_inputs() -> dict[str, Any]:
    """Five latent frames: its normalization of the first four needs one more."""
    return {**_inputs(), "image": image(48, 80), "num_frames": 17}


def _kandinsky6_inputs() -> dict[str, Any]:
    """Also 17 tokens of audio, and a long text: its template cannot be changed."""
    return {**_inputs(), "max_sequence_length": 300}


def _kandinsky6_image_inputs() -> dict[str, Any]:
    """The image is a frame more."""
    return {**_kandinsky6_inputs(), "image": image(48, 80)}


TINY = {
    "kandinsky5": TinyPipe(_text_to_video, _inputs, "calls", output="frames"),
    "kandinsky5_image_to_video": TinyPipe(_image_to_video, _image_to_video_inputs, "calls", output="frames"),
    "kandinsky6": TinyPipe(_kandinsky6, _kandinsky6_inputs, "calls", output="frames"),
    "kandinsky6_audio": TinyPipe(_kandinsky6, _kandinsky6_inputs, "calls", output="audio"),
    "kandinsky6_image": TinyPipe(_kandinsky6, _kandinsky6_image_inputs, "calls", output="frames"),
}
