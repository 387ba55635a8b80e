"""CogVideoX."""

from __future__ import annotations

from typing import Any

from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    CogVideoXVideoToVideoPipeline,
)
from torch import nn

from tests.pipelines import vaes_video
from tests.pipelines.media import image, video
from tests.pipelines.text.t5 import t5
from tests.pipelines.tiny import TinyPipe, no_zeros

_CONFIG = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 16,
    "num_layers": 2,
    "sample_height": 6,
    "sample_width": 10,
    "sample_frames": 9,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": 24,
    "use_rotary_positional_embeddings": True,
}


def _transformer(**config: Any) -> CogVideoXTransformer3DModel:
    return CogVideoXTransformer3DModel(**{**_CONFIG, **config})


def _components(transformer: nn.Module) -> dict[str, Any]:
    tokenizer, text_encoder = t5()
    return {
        "transformer": no_zeros(transformer.eval()),
        "vae": vaes_video.cogvideox(),
        "scheduler": CogVideoXDDIMScheduler(),
        "tokenizer": tokenizer,
        "text_encoder": text_encoder,
    }


def _text_to_video() -> CogVideoXPipeline:
    return CogVideoXPipeline(**_components(_transformer()))


def _sincos() -> CogVideoXPipeline:
    return CogVideoXPipeline(**_components(_transformer(use_rotary_positional_embeddings=False)))


def _text_to_video_1_5() -> CogVideoXPipeline:
    components = _components(_transformer(patch_size_t=2, patch_bias=False))
    return CogVideoXPipeline(**{**components, "scheduler": CogVideoXDPMScheduler()})


def _image_to_video() -> CogVideoXImageToVideoPipeline:
    return CogVideoXImageToVideoPipeline(
        **_components(_transformer(in_channels=8, use_learned_positional_embeddings=True))
    )


def _image_to_video_1_5() -> CogVideoXImageToVideoPipeline:
    transformer = _transformer(in_channels=8, patch_size_t=2, patch_bias=False, ofs_embed_dim=8)
    return CogVideoXImageToVideoPipeline(**_components(transformer))


def _video_to_video() -> CogVideoXVideoToVideoPipeline:
    return CogVideoXVideoToVideoPipeline(**_components(_transformer()))


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
        "guidance_scale": 6.0,
        "output_type": "latent",
    }


def _image_to_video_inputs() -> dict[str, Any]:
    return {**_inputs(), "image": image(48, 80)}


def _video_to_video_inputs() -> dict[str, Any]:
    """Two of four steps."""
    inputs = {**_inputs(), "video": video(9, 48, 80), "num_inference_steps": 4, "strength": 0.5}
    del inputs["num_frames"]
    return inputs


TINY = {
    "cogvideox": TinyPipe(_text_to_video, _inputs, "batch", output="frames"),
    "cogvideox_sincos": TinyPipe(_sincos, _inputs, "batch", output="frames"),
    "cogvideox_1_5": TinyPipe(_text_to_video_1_5, _inputs, "batch", output="frames"),
    "cogvideox_image_to_video": TinyPipe(_image_to_video, _image_to_video_inputs, "batch", output="frames"),
    "cogvideox_image_to_video_1_5": TinyPipe(_image_to_video_1_5, _image_to_video_inputs, "batch", output="frames"),
    "cogvideox_video_to_video": TinyPipe(_video_to_video, _video_to_video_inputs, "batch", output="frames"),
}
