"""Wan, Wan-Animate and Lucy Edit."""

from __future__ import annotations

from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    LucyEditPipeline,
    UniPCMultistepScheduler,
    WanAnimatePipeline,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVideoToVideoPipeline,
)
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from tests.models import TINY as MODELS
from tests.pipelines import vaes_video
from tests.pipelines.media import image, prompt_embeds, video
from tests.pipelines.text.t5 import umt5
from tests.pipelines.tiny import TinyPipe, no_zeros

SIZE = {"height": 48, "width": 80}  # 15 tokens of each latent frame
STEPS = {"num_inference_steps": 2, "guidance_scale": 4.0, "output_type": "latent"}
TEXT = {"prompt": "A cat runs.", "negative_prompt": "A slow dog, blurred.", "max_sequence_length": 24}


def unipc() -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def _euler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=7.0)


def common() -> dict[str, Any]:
    """Text encoder and autoencoder."""
    tokenizer, text_encoder = umt5()
    return {"tokenizer": tokenizer, "text_encoder": text_encoder, "vae": vaes_video.wan()}


def transformer(**config: Any) -> WanTransformer3DModel:
    return no_zeros(MODELS["wan"].make(**config).eval())


def clip_vision(image_size: int = 8) -> dict[str, Any]:
    """An encoder of images, 5 tokens each."""
    encoder = CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=image_size,
            patch_size=image_size // 2,
        )
    )
    processor = CLIPImageProcessor(
        size={"shortest_edge": image_size}, crop_size={"height": image_size, "width": image_size}
    )
    return {"image_encoder": encoder.eval(), "image_processor": processor}


def _wan() -> WanPipeline:
    return WanPipeline(transformer=transformer(), scheduler=_euler(), **common())


def _wan_two_experts() -> WanPipeline:
    return WanPipeline(
        transformer=transformer(), transformer_2=transformer(), scheduler=unipc(), boundary_ratio=0.875, **common()
    )


def _wan_per_token_timestep() -> WanPipeline:
    return WanPipeline(transformer=transformer(), scheduler=unipc(), expand_timesteps=True, **common())


def _inputs() -> dict[str, Any]:
    return {**TEXT, **SIZE, **STEPS, "num_frames": 9}


def _image_to_video() -> WanImageToVideoPipeline:
    return WanImageToVideoPipeline(
        transformer=transformer(in_channels=12, image_dim=16, added_kv_proj_dim=48),
        scheduler=_euler(),
        **clip_vision(),
        **common(),
    )


def _image_to_video_inputs() -> dict[str, Any]:
    """The model takes 512 tokens for text, and the others for the image."""
    return {**prompt_embeds(300, 500, 512), **SIZE, **STEPS, "num_frames": 9, "image": image(48, 80)}


def _image_to_video_two_experts() -> WanImageToVideoPipeline:
    return WanImageToVideoPipeline(
        transformer=transformer(in_channels=12),
        transformer_2=transformer(in_channels=12),
        scheduler=unipc(),
        boundary_ratio=0.875,
        **common(),
    )


def _image_to_video_two_experts_inputs() -> dict[str, Any]:
    return {**_image_to_video_per_token_timestep_inputs(), "guidance_scale_2": 3.0}


def _image_to_video_per_token_timestep() -> WanImageToVideoPipeline:
    return WanImageToVideoPipeline(transformer=transformer(), scheduler=unipc(), expand_timesteps=True, **common())


def _image_to_video_per_token_timestep_inputs() -> dict[str, Any]:
    return {**prompt_embeds(9, 20, 24), **SIZE, **STEPS, "num_frames": 9, "image": image(48, 80)}


def _video_to_video() -> WanVideoToVideoPipeline:
    return WanVideoToVideoPipeline(transformer=transformer(), scheduler=unipc(), **common())


def _video_to_video_inputs() -> dict[str, Any]:
    """Two of four steps."""
    return {
        **prompt_embeds(9, 20, 24),
        **SIZE,
        **STEPS,
        "video": video(9, 48, 80),
        "num_inference_steps": 4,
        "strength": 0.5,
    }


def _vace() -> WanVACEPipeline:
    control = MODELS["wan_vace"].make(vace_in_channels=72)
    return WanVACEPipeline(transformer=no_zeros(control.eval()), scheduler=_euler(), **common())


def _vace_inputs() -> dict[str, Any]:
    masks = [frame.convert("L") for frame in video(9, 48, 80, seed=2)]
    return {
        **prompt_embeds(9, 20, 24),
        **SIZE,
        **STEPS,
        "num_frames": 9,
        "video": video(9, 48, 80),
        "mask": masks,
        "reference_images": [image(48, 80, seed=3)],
    }


def _animate() -> WanAnimatePipeline:
    animated = MODELS["wan_animate_image"].make(motion_encoder_batch_size=8)
    return WanAnimatePipeline(transformer=no_zeros(animated.eval()), scheduler=unipc(), **clip_vision(), **common())


def _animate_inputs() -> dict[str, Any]:
    """Two segments of a reference and three latent frames, the second after the last frame of the first."""
    return {
        **prompt_embeds(300, 500, 512),
        **SIZE,
        **STEPS,
        "image": image(48, 80),
        "pose_video": video(17, 48, 80, seed=2),
        "face_video": video(17, 8, 8, seed=3),
        "segment_frame_length": 9,
    }


def _replace_inputs() -> dict[str, Any]:
    masks = [frame.convert("L") for frame in video(17, 48, 80, seed=4)]
    return {
        **_animate_inputs(),
        "mode": "replace",
        "background_video": video(17, 48, 80, seed=5),
        "mask_video": masks,
    }


def _lucy_edit() -> LucyEditPipeline:
    return LucyEditPipeline(transformer=transformer(in_channels=8), scheduler=unipc(), **common())


def _lucy_edit_inputs() -> dict[str, Any]:
    return {**prompt_embeds(9, 20, 24), **SIZE, **STEPS, "num_frames": 9, "video": video(9, 48, 80)}


TINY = {
    "wan": TinyPipe(_wan, _inputs, "calls", output="frames"),
    "wan_two_experts": TinyPipe(
        _wan_two_experts, _inputs, "calls", transformers=("transformer", "transformer_2"), output="frames"
    ),
    "wan_per_token_timestep": TinyPipe(_wan_per_token_timestep, _inputs, "calls", output="frames"),
    "wan_image_to_video": TinyPipe(_image_to_video, _image_to_video_inputs, "calls", output="frames"),
    "wan_image_to_video_two_experts": TinyPipe(
        _image_to_video_two_experts,
        _image_to_video_two_experts_inputs,
        "calls",
        transformers=("transformer", "transformer_2"),
        output="frames",
    ),
    "wan_image_to_video_per_token_timestep": TinyPipe(
        _image_to_video_per_token_timestep, _image_to_video_per_token_timestep_inputs, "calls", output="frames"
    ),
    "wan_video_to_video": TinyPipe(_video_to_video, _video_to_video_inputs, "calls", output="frames"),
    "wan_vace": TinyPipe(_vace, _vace_inputs, "calls", output="frames"),
    "wan_animate": TinyPipe(_animate, _animate_inputs, "calls", output="frames"),
    "wan_animate_replace": TinyPipe(_animate, _replace_inputs, "calls", output="frames"),
    "lucy_edit": TinyPipe(_lucy_edit, _lucy_edit_inputs, "calls", output="frames"),
}
