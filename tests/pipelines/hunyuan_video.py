"""HunyuanVideo, FramePack and HunyuanVideo 1.5."""

from __future__ import annotations

from typing import Any

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    HunyuanSkyreelsImageToVideoPipeline,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideoFramepackPipeline,
    HunyuanVideoImageToVideoPipeline,
    HunyuanVideoPipeline,
)
from diffusers.guiders import ClassifierFreeGuidance
from transformers import ByT5Tokenizer, SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

from tests.models import TINY as MODELS
from tests.pipelines import vaes_video
from tests.pipelines.media import image
from tests.pipelines.text.clip import clip
from tests.pipelines.text.llama import image_template, llama, llava, template
from tests.pipelines.text.qwen import qwen25_vl
from tests.pipelines.text.t5 import t5
from tests.pipelines.tiny import TinyPipe, no_zeros


def _scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(shift=7.0)


def _text() -> dict[str, Any]:
    tokenizer, text_encoder = llama()
    tokenizer_2, text_encoder_2 = clip(hidden=8)
    return {
        "tokenizer": tokenizer,
        "text_encoder": text_encoder,
        "tokenizer_2": tokenizer_2,
        "text_encoder_2": text_encoder_2,
    }


def _video() -> HunyuanVideoPipeline:
    transformer = MODELS["hunyuan_video"].make(patch_size=2)
    return HunyuanVideoPipeline(
        transformer=no_zeros(transformer.eval()),
        vae=vaes_video.hunyuan_video(),
        scheduler=_scheduler(),
        **_text(),
    )


def _inputs() -> dict[str, Any]:
    """Three latent frames of 15 tokens, and one branch: guidance is an input of the model."""
    return {
        "prompt": "A cat runs.",
        "prompt_template": template(),
        "max_sequence_length": 32,
        "height": 48,
        "width": 80,
        "num_frames": 9,
        "num_inference_steps": 2,
        "guidance_scale": 4.5,
        "output_type": "latent",
    }


def _true_cfg_inputs() -> dict[str, Any]:
    return {**_inputs(), "negative_prompt": "A slow dog, blurred.", "true_cfg_scale": 3.0}


def _image_to_video(**config: Any) -> HunyuanVideoImageToVideoPipeline:
    transformer = MODELS["hunyuan_video"].make(**{"patch_size": 2, **config})
    components = _text()
    components["tokenizer"], components["text_encoder"], images = llava()
    return HunyuanVideoImageToVideoPipeline(
        transformer=no_zeros(transformer.eval()),
        vae=vaes_video.hunyuan_video(),
        scheduler=_scheduler(),
        image_processor=images,
        **components,
    )


def _latent_concat() -> HunyuanVideoImageToVideoPipeline:
    return _image_to_video(image_condition_type="latent_concat", in_channels=9, guidance_embeds=False)


def _token_replace() -> HunyuanVideoImageToVideoPipeline:
    return _image_to_video(image_condition_type="token_replace", num_layers=2, num_single_layers=2)


def _image_to_video_inputs() -> dict[str, Any]:
    return {**_true_cfg_inputs(), "prompt_template": image_template(), "image": image(48, 80)}


def _skyreels_image_to_video() -> HunyuanSkyreelsImageToVideoPipeline:
    transformer = MODELS["hunyuan_video"].make(in_channels=8, patch_size=2)
    return HunyuanSkyreelsImageToVideoPipeline(
        transformer=no_zeros(transformer.eval()),
        vae=vaes_video.hunyuan_video(),
        scheduler=_scheduler(),
        **_text(),
    )


def _skyreels_image_to_video_inputs() -> dict[str, Any]:
    return {**_true_cfg_inputs(), "image": image(48, 80)}


def _siglip() -> dict[str, Any]:
    """An encoder of images, 4 tokens each."""
    encoder = SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
        )
    )
    return {"image_encoder": encoder.eval(), "feature_extractor": SiglipImageProcessor(size={"height": 8, "width": 8})}


def _framepack() -> HunyuanVideoFramepackPipeline:
    transformer = MODELS["framepack"].make()
    return HunyuanVideoFramepackPipeline(
        transformer=no_zeros(transformer.eval()),
        vae=vaes_video.hunyuan_video(),
        scheduler=_scheduler(),
        **_siglip(),
        **_text(),
    )


def _framepack_inputs() -> dict[str, Any]:
    """Two sections, the second with the first as its history. The result is a list: the latents after each section."""
    return {
        **_true_cfg_inputs(),
        "image": image(48, 80),
        "num_frames": 13,
        "latent_window_size": 3,
    }


def _video15_of(kind: type, **components: Any) -> Any:
    transformer = MODELS["hunyuan_video15"].make(in_channels=9, image_embed_dim=16, target_size=16)
    tokenizer, model = qwen25_vl(layers=3)
    _, text_encoder_2 = t5(width=8, vocabulary=384)
    pipe = kind(
        transformer=no_zeros(transformer.eval()),
        vae=vaes_video.hunyuan_video15(),
        scheduler=_scheduler(),
        tokenizer=tokenizer,
        text_encoder=model.model.language_model,
        tokenizer_2=ByT5Tokenizer(),
        text_encoder_2=text_encoder_2,
        guider=ClassifierFreeGuidance(guidance_scale=4.0),
        **components,
    )
    # a template and texts of a few tokens
    pipe.system_message = "Describe the video:"
    chat = [{"role": "system", "content": pipe.system_message}, {"role": "user", "content": ""}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=False, return_dict=True)["input_ids"]
    pipe.prompt_template_encode_start_idx = len(ids) - 2  # without the end of the message
    pipe.tokenizer_max_length = 24
    pipe.tokenizer_2_max_length = 12
    pipe.vision_num_semantic_tokens = 4
    return pipe


def _video15() -> HunyuanVideo15Pipeline:
    return _video15_of(HunyuanVideo15Pipeline)


def _video15_image_to_video() -> HunyuanVideo15ImageToVideoPipeline:
    return _video15_of(HunyuanVideo15ImageToVideoPipeline, **_siglip())


def _video15_inputs() -> dict[str, Any]:
    """Three latent frames of 15 tokens; what is quoted is for the second text encoder."""
    return {
        "prompt": 'A cat says "hi".',
        "negative_prompt": "A slow dog, blurred.",
        "height": 12,
        "width": 20,
        "num_frames": 5,
        "num_inference_steps": 2,
        "output_type": "latent",
    }


def _video15_image_to_video_inputs() -> dict[str, Any]:
    """It chooses height and width by the image."""
    inputs = {**_video15_inputs(), "image": image(12, 20)}
    del inputs["height"], inputs["width"]
    return inputs


TINY = {
    "hunyuan_video": TinyPipe(_video, _inputs, "none", output="frames"),
    "hunyuan_video_true_cfg": TinyPipe(_video, _true_cfg_inputs, "calls", output="frames"),
    "hunyuan_video_image_to_video": TinyPipe(_latent_concat, _image_to_video_inputs, "calls", output="frames"),
    "hunyuan_video_token_replace": TinyPipe(_token_replace, _image_to_video_inputs, "calls", output="frames"),
    "hunyuan_skyreels_image_to_video": TinyPipe(
        _skyreels_image_to_video, _skyreels_image_to_video_inputs, "calls", output="frames"
    ),
    "framepack": TinyPipe(_framepack, _framepack_inputs, "calls", output="frames"),
    "hunyuan_video15": TinyPipe(_video15, _video15_inputs, "calls", output="frames"),
    "hunyuan_video15_image_to_video": TinyPipe(
        _video15_image_to_video, _video15_image_to_video_inputs, "calls", output="frames"
    ),
}
