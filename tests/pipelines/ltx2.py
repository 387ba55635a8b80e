"""LTX-2."""

from __future__ import annotations

from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    LTX2ImageToVideoPipeline,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

from tests.models import TINY as MODELS
from tests.pipelines import vaes_audio, vaes_video
from tests.pipelines.media import image
from tests.pipelines.text.gemma3 import gemma3
from tests.pipelines.tiny import TinyPipe, no_zeros


def _components(config: dict[str, Any], **connectors: Any) -> dict[str, Any]:
    tokenizer, text_encoder = gemma3()
    texts = LTX2TextConnectors(
        **{
            "caption_channels": 16,
            "text_proj_in_factor": 3,  # a hidden state of each of the two layers, and that before them
            "video_connector_num_attention_heads": 2,
            "video_connector_attention_head_dim": 8,
            "video_connector_num_layers": 1,
            "video_connector_num_learnable_registers": None,
            "audio_connector_num_attention_heads": 2,
            "audio_connector_attention_head_dim": 8,
            "audio_connector_num_layers": 1,
            "audio_connector_num_learnable_registers": None,
            "connector_rope_base_seq_len": 32,
            **connectors,
        }
    )
    vocoder = LTX2Vocoder(
        in_channels=16,
        hidden_channels=8,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        output_sampling_rate=16000,
    )
    return {
        "transformer": no_zeros(LTX2VideoTransformer3DModel(**config).eval()),
        "vae": vaes_video.ltx2(),
        "audio_vae": vaes_audio.ltx2(),
        "vocoder": vocoder.eval(),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
        "tokenizer": tokenizer,
        "text_encoder": text_encoder,
        "connectors": no_zeros(texts.eval()),
    }


def _ltx2() -> LTX2Pipeline:
    return LTX2Pipeline(**_components(MODELS["ltx2"].config))


def _newer() -> LTX2Pipeline:
    """LTX-2.3: a projection of text for each modality, and attention that can be left out."""
    config = {**MODELS["ltx2_newer"].config, "use_keyframes_abs_pos_embedding": False}
    connectors = {
        "video_connector_attention_head_dim": 16,
        "video_connector_num_learnable_registers": 8,
        "audio_connector_num_learnable_registers": 8,
        "per_modality_projections": True,
        "video_hidden_dim": 32,
        "audio_hidden_dim": 16,
    }
    return LTX2Pipeline(**_components(config, **connectors))


def _image_to_video() -> LTX2ImageToVideoPipeline:
    return LTX2ImageToVideoPipeline(**_components(MODELS["ltx2"].config))


def _inputs() -> dict[str, Any]:
    """Three latent frames of 15 tokens, and 17 tokens of audio."""
    return {
        "prompt": "A cat runs.",
        "negative_prompt": "A slow dog, blurred.",
        "max_sequence_length": 24,
        "height": 96,
        "width": 160,
        "num_frames": 17,
        "frame_rate": 25.0,
        "num_inference_steps": 2,
        "guidance_scale": 3.0,
        "stg_scale": 0.0,
        "modality_scale": 1.0,
        "guidance_rescale": 0.0,
        "audio_guidance_scale": 5.0,
        "audio_stg_scale": 0.0,
        "audio_modality_scale": 1.0,
        "audio_guidance_rescale": 0.0,
        "spatio_temporal_guidance_blocks": None,
        "use_cross_timestep": False,
        "output_type": "latent",
    }


def _guided_inputs() -> dict[str, Any]:
    """A call with two more branches: without the attention of a block, and without the other modality."""
    return {
        **_inputs(),
        "stg_scale": 1.0,
        "modality_scale": 3.0,
        "guidance_rescale": 0.7,
        "audio_stg_scale": 1.0,
        "audio_modality_scale": 3.0,
        "audio_guidance_rescale": 0.7,
        "spatio_temporal_guidance_blocks": [1],
        "use_cross_timestep": True,
    }


def _image_to_video_inputs() -> dict[str, Any]:
    return {**_inputs(), "image": image(96, 160), "image_crf": 0}


TINY = {
    "ltx2": TinyPipe(_ltx2, _inputs, "batch", output="frames"),
    "ltx2_audio": TinyPipe(_ltx2, _inputs, "batch", output="audio"),
    "ltx2_guided": TinyPipe(_newer, _guided_inputs, "batch", output="frames"),
    "ltx2_image_to_video": TinyPipe(_image_to_video, _image_to_video_inputs, "batch", output="frames"),
}
