"""Pipelines of pictures."""

# fmt: off
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tests.pipelines import text, vaes
from tests.pipelines.tiny import WORDS, WORDS_2, WORDS_3, TinyPipe, flow_match, image, model, of, parts_of, quiet_steps

PROMPT = "a small red cat"
_NEGATIVE = "blurry"
_TWO_PROMPTS = {
    "prompt": [PROMPT, "two green birds fly"], "negative_prompt": [_NEGATIVE, "dark picture"],
}
# 3 x 5 tokens: the transformer sees patches of 2 x 2 of what the autoencoder makes 2, 4, 8 or 16 times smaller.
_BY_2, _BY_4, _BY_8, _BY_16 = (12, 20), (24, 40), (48, 80), (96, 160)
_KL_2 = partial(vaes.kl, levels=2)


def _asked(size: tuple[int, int], **others: Any) -> dict[str, Any]:
    """The arguments that almost every call has: two steps, and latents as the result."""
    call = {"prompt": PROMPT, "height": size[0], "width": size[1], "num_inference_steps": 2, "output_type": "latent"}
    return {**call, **others}


def _guided(size: tuple[int, int], scale: float, **others: Any) -> dict[str, Any]:
    return _asked(size, negative_prompt=_NEGATIVE, guidance_scale=scale, **others)


def _true_cfg(size: tuple[int, int], **others: Any) -> dict[str, Any]:
    return _asked(size, negative_prompt=_NEGATIVE, true_cfg_scale=3.0, **others)


def _img2img(size: tuple[int, int]) -> dict[str, Any]:
    return {"image": image(*size), "strength": 0.5, "num_inference_steps": 4}


def _mask(size: tuple[int, int]) -> Image.Image:
    """A mask of the left third."""
    values = np.zeros(size, dtype=np.uint8)
    values[:, : size[1] // 3] = 255
    return Image.fromarray(values)


def _with(**attributes: Any) -> Callable[[Any], None]:
    """A function that sets attributes of a pipeline."""
    return lambda pipe: vars(pipe).update(attributes)


def _embeds(**shapes: Any) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(4)
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def _cfg_embeds(tokens: int, width: int) -> dict[str, Tensor]:
    """For pipelines whose negative prompt is empty unless it is given as embeddings."""
    return _embeds(negative_prompt_embeds=(1, tokens, width))


# FLUX and models of its form

_FLUX = TinyPipe(
    "FluxPipeline",
    {
        WORDS: text.clip, WORDS_2: partial(text.t5, 32), "vae": _KL_2, "scheduler": flow_match(),
        "transformer": model("flux", in_channels=16),
    },
    _true_cfg(_BY_2, max_sequence_length=17), "calls",
)
_SCALED_FLUX = {"transformer": model("flux", in_channels=16, guidance_embeds=True)}
_FLUX_CONTROL = model("control_flux", in_channels=16)
_MASKED = {"image": image(*_BY_2), "mask_image": _mask(_BY_2)}
_FLUX2 = TinyPipe(
    "Flux2Pipeline",
    parts_of(  # the pipelines take the text from three layers of the first 30, or 27
        partial(text.mistral3, 30), model("flux2", 2, in_channels=16, joint_attention_dim=48), vaes.flux2
    ),
    _asked(_BY_8, max_sequence_length=67, guidance_scale=4.0), "none",
)
_KLEIN = _FLUX2.but(
    "Flux2KleinPipeline",
    {
        WORDS: partial(text.qwen3, layers=27, causal_lm=True),
        "transformer": model("flux2", 2, in_channels=16, joint_attention_dim=48, guidance_embeds=False),
    },
    {"max_sequence_length": 25, **_cfg_embeds(13, 48)}, guidance="calls",
)
_REFERENCE = {"image": image(80, 80)}  # no side may be below 64
_CHROMA = TinyPipe(
    "ChromaPipeline", parts_of(partial(text.t5, 32), model("chroma", 2, in_channels=16), _KL_2),
    _guided(_BY_2, 4.0, max_sequence_length=29), "calls",
)
_LONGCAT = TinyPipe(
    "LongCatImagePipeline",
    {
        f"{WORDS} text_processor": lambda: text.with_processor(text.qwen25_vl(), text.qwen2_processor),
        "transformer": model("longcat_image", 2, in_channels=64, joint_attention_dim=16, pooled_projection_dim=16),
        "vae": partial(vaes.kl, 16, levels=2), "scheduler": flow_match(),
    },
    _guided(_BY_2, 4.5, enable_prompt_rewrite=False), "calls",
    prepare=_with(tokenizer_max_length=37),  # its texts are padded to 512 else
)
_FLUXES = {
    "flux": _FLUX.but(
        parts=_SCALED_FLUX, call={"negative_prompt": ..., "true_cfg_scale": ..., "guidance_scale": 3.5}, guidance="none"
    ),
    "flux_true_cfg": _FLUX,
    "flux_img2img": _FLUX.but("FluxImg2ImgPipeline", call=_img2img(_BY_2)),
    "flux_inpaint": _FLUX.but("FluxInpaintPipeline", call={**_img2img(_BY_2), **_MASKED}),
    "flux_kontext": _FLUX.but(
        "FluxKontextPipeline", _SCALED_FLUX, {"image": image(20, 12), "max_area": 240, "_auto_resize": False}
    ),
    "flux_fill": _FLUX.but(  # the transformer sees the latents, those of the masked image and the mask of each pixel
        "FluxFillPipeline", {"transformer": model("flux", guidance_embeds=True, in_channels=48, out_channels=16)},
        {"negative_prompt": ..., "true_cfg_scale": ..., "guidance_scale": 30.0, **_MASKED}, guidance="none",
    ),
    "flux_controlnet": _FLUX.but(
        "FluxControlNetPipeline", {"controlnet": _FLUX_CONTROL}, {"control_image": image(*_BY_2)},
        controlnets=("controlnet",),
    ),
    "flux_two_controlnets": _FLUX.but(
        "FluxControlNetPipeline", {"controlnet": lambda: [_FLUX_CONTROL(), _FLUX_CONTROL()]},
        {"control_image": [image(*_BY_2), image(*_BY_2, seed=2)], "controlnet_conditioning_scale": [0.8, 0.5]},
        controlnets=("controlnet.nets.0", "controlnet.nets.1"),
    ),
    "flux2": _FLUX2,
    "flux2_image": _FLUX2.but(call=_REFERENCE),
    "flux2_klein": _KLEIN,
    "flux2_klein_kv": _KLEIN.but(  # keeps the keys of the reference image
        "Flux2KleinKVPipeline", call={**_REFERENCE, "guidance_scale": ..., "negative_prompt_embeds": ...},
        guidance="none",
    ),
    "flux2_klein_image": _KLEIN.but(call=_REFERENCE),
    "chroma": _CHROMA,
    "chroma_img2img": _CHROMA.but("ChromaImg2ImgPipeline", call=_img2img(_BY_2)),
    "longcat_image": _LONGCAT,
    # Images to be edited are made as large as 1024 x 1024: 3 x 5 tokens, halved 7 times.
    "longcat_image_edit": _LONGCAT.but(
        "LongCatImageEditPipeline", {"vae": partial(vaes.kl, 16, levels=8)},
        {"image": image(20, 12), "height": ..., "width": ..., "enable_prompt_rewrite": ...},
    ),
    "ovis_image": TinyPipe(
        "OvisImagePipeline",
        parts_of(text.qwen3, model("ovis_image", 2, in_channels=16, out_channels=16, joint_attention_dim=16), _KL_2),
        _guided(_BY_2, 5.0, max_sequence_length=29), "calls",
    ),
    "bria": TinyPipe(
        "BriaPipeline", parts_of(partial(text.t5, 32), model("bria", 2, in_channels=16), _KL_2),
        _guided(_BY_2, 5.0, max_sequence_length=29), "batch",
    ),
    "fibo": TinyPipe(
        "BriaFiboPipeline",
        parts_of(
            text.smollm3, model("fibo", 2, text_encoder_dim=16),
            partial(vaes.wan_patches, 3, 2, 1.0, scale_factor_spatial=16),
        ),
        _guided(_BY_8, 5.0), "batch",
    ),
}

# CogView, DiT, HunyuanDiT, PixArt, Sana and SD3

_SD3_SIZES: dict[str, Any] = {
    "sample_size": 16, "patch_size": 2, "pooled_projection_dim": 32, "pos_embed_max_size": 16, "qk_norm": "rms_norm",
    "out_channels": 4,
}
_CLIP = partial(text.clip, 16, projection=16, length=31)
_SD3 = TinyPipe(
    "StableDiffusion3Pipeline",
    {
        WORDS: _CLIP, WORDS_2: _CLIP, WORDS_3: partial(text.t5, 32), "transformer": model("sd3", 2, **_SD3_SIZES),
        "vae": _KL_2, "scheduler": flow_match(shift=3.0),
    },
    _guided(_BY_2, 5.0, max_sequence_length=17), "batch",
)
_SANA_SIZES: dict[str, Any] = {"caption_channels": 16, "sample_size": 8}
_SANA = TinyPipe(
    "SanaPipeline",
    parts_of(
        text.gemma2, model("sana", 2, **_SANA_SIZES, qk_norm=None), vaes.dc,
        quiet_steps("DPMSolverMultistepScheduler", prediction_type="flow_prediction"),
    ),
    _guided(
        (160, 96), 4.5, max_sequence_length=21, use_resolution_binning=False,
        complex_human_instruction=["Add colors:", "User: "],
    ),
    "batch",
)
# gain 1: larger matrices magnify the last bit of float32 too much
_PIXART_SIZES: dict[str, Any] = {"attention_head_dim": 12, "cross_attention_dim": 48, "caption_channels": 16}
_SIGMA = TinyPipe(
    "PixArtSigmaPipeline",
    parts_of(text.t5, model("pixart", **_PIXART_SIZES), scheduler=of("DDIMScheduler")),
    _guided(_BY_8, 4.5, max_sequence_length=29, clean_caption=False, use_resolution_binning=False), "batch",
)
_DIT_SIZES: dict[str, Any] = {
    "attention_head_dim": 8, "cross_attention_dim": 16, "cross_attention_dim_t5": 16, "hidden_size": 32,
    "text_len": 77, "text_len_t5": 256,
}
_HUNYUAN_DIT = TinyPipe(
    "HunyuanDiTPipeline",
    {
        WORDS: text.bert, WORDS_2: partial(text.t5, length=256), "transformer": model("hunyuan_dit", **_DIT_SIZES),
        "vae": vaes.kl, "scheduler": of("DDPMScheduler"),
        "safety_checker feature_extractor requires_safety_checker": lambda: (None, None, False),
    },
    _guided(_BY_8, 5.0, use_resolution_binning=False), "batch",
)
_OTHERS = {
    "sd3": _SD3,
    "sd3_img2img": _SD3.but("StableDiffusion3Img2ImgPipeline", call=_img2img(_BY_2)),
    "sd3_controlnet": _SD3.but(  # sizes must be multiples of 8
        "StableDiffusion3ControlNetPipeline", {"controlnet": model("control_sd3", 2, **_SD3_SIZES)},
        {"height": 24, "width": 40, "control_image": image(24, 40), "controlnet_conditioning_scale": 0.7},
        controlnets=("controlnet",),
    ),
    "sd3_skip_layers": _SD3.but(  # two branches in one call, and one more with the layers left out
        call={"skip_guidance_layers": [1], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
    ),
    "sana": _SANA,
    "sana_controlnet": _SANA.but(
        "SanaControlNetPipeline", {"controlnet": model("control_sana", 2, **_SANA_SIZES, num_layers=1)},
        {"control_image": image(160, 96)}, controlnets=("controlnet",),
    ),
    "sana_sprint": _SANA.but(
        "SanaSprintPipeline",
        {"transformer": model("sana", 2, **_SANA_SIZES, guidance_embeds=True), "scheduler": of("SCMScheduler")},
        {"negative_prompt": ...}, guidance="none",
    ),
    "pixart_alpha": _SIGMA.but(  # its transformer also takes the resolution
        "PixArtAlphaPipeline",
        {
            "transformer": model("pixart", **_PIXART_SIZES, sample_size=128, use_additional_conditions=True),
            "scheduler": quiet_steps("DPMSolverMultistepScheduler"),
        },
    ),
    "pixart_sigma": _SIGMA,
    "pixart_sigma_two_prompts": _SIGMA.but(call=_TWO_PROMPTS),
    "hunyuan_dit": _HUNYUAN_DIT,
    "hunyuan_dit_controlnet": _HUNYUAN_DIT.but(
        "HunyuanDiTControlNetPipeline",
        {"controlnet": model("control_hunyuan_dit", **_DIT_SIZES, transformer_num_layers=4)},
        {"control_image": image(*_BY_8)}, controlnets=("controlnet",),
    ),
    "dit": TinyPipe(  # it has no latents to give: images are compared
        "DiTPipeline",
        {
            "transformer": model("dit", 2, attention_head_dim=8, num_embeds_ada_norm=1000),
            "vae": partial(vaes.kl, levels=2, quant=True), "scheduler": of("DDIMScheduler"),
        },
        {"class_labels": [1, 3], "guidance_scale": 4.0, "num_inference_steps": 2, "output_type": "np"}, "batch",
    ),
    "cogview3_plus": TinyPipe(
        "CogView3PlusPipeline",
        parts_of(text.t5, model("cogview3_plus", 2, text_embed_dim=16), scheduler=of("CogVideoXDDIMScheduler")),
        _guided(_BY_8, 5.0, max_sequence_length=29), "batch",
    ),
    "cogview4": TinyPipe(  # texts are padded to multiples of 16: the two have other lengths
        "CogView4Pipeline",
        parts_of(
            text.glm, model("cogview4", 2, text_embed_dim=16),
            scheduler=flow_match(
                base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True,
                time_shift_type="linear",
            ),
        ),
        _guided(_BY_8, 5.0, prompt="two green birds fly over a grey lake"), "calls",
    ),
    "auraflow": TinyPipe(
        "AuraFlowPipeline", parts_of(text.umt5, model("auraflow", 2), _KL_2, flow_match(shift=1.73)),
        _guided(_BY_2, 3.5, max_sequence_length=29), "batch",
    ),
    "hidream": TinyPipe(  # 5 x 5 tokens; the pipeline makes all images as large as its default sample size says
        "HiDreamImagePipeline",
        {
            WORDS: partial(text.clip, 16, projection=8), WORDS_2: partial(text.clip, 16, projection=8),
            WORDS_3: text.t5, "tokenizer_4 text_encoder_4": text.llama_causal,
            "vae": _KL_2, "scheduler": flow_match(shift=3.0),
            "transformer": model(
                "hidream", 2, caption_channels=[16, 16], text_emb_dim=16, max_resolution=(10, 10),
                llama_layers=(0, 1, 1, 0),
            ),
        },
        _guided((20, 20), 5.0, max_sequence_length=29), "batch", prepare=_with(default_sample_size=10),
    ),
    "lumina2": TinyPipe(
        "Lumina2Pipeline",
        parts_of(
            text.gemma2, model("lumina2", 2, multiple_of=16, axes_lens=(128, 16, 16)), scheduler=flow_match(shift=6.0)
        ),
        _guided(_BY_8, 4.0, system_prompt="Paint.", max_sequence_length=61), "calls",
    ),
    "lumina": TinyPipe(  # proportional attention (`proportional_attn`) is the default
        "LuminaPipeline", parts_of(text.gemma2, model("lumina_next", 2, sample_size=4)),
        _guided(_BY_8, 4.0, clean_caption=False, max_sequence_length=61), "batch",
    ),
    "prx": TinyPipe(  # its cleaning of prompts needs ftfy, which is not installed
        "PRXPipeline", parts_of(partial(text.t5_gemma, 13), model("prx", 2), scheduler=flow_match(shift=3.0)),
        _asked(
            _BY_8, prompt=None, guidance_scale=5.0, use_resolution_binning=False,
            **_embeds(prompt_embeds=(1, 13, 16), negative_prompt_embeds=(1, 13, 16)),
            prompt_attention_mask=torch.arange(13)[None] < 11,
            negative_prompt_attention_mask=torch.arange(13)[None] < 6,
        ),
        "batch",
    ),
}

# language models of several kinds: GLM-Image, HunyuanImage, Kandinsky, Krea, OmniGen, Qwen, Z-Image

_QWEN = TinyPipe(
    "QwenImagePipeline", parts_of(text.qwen25_vl, model("qwen_image", 2), vaes.qwen_image), _true_cfg(_BY_4), "calls"
)
_QWEN_EDIT = _QWEN.but(  # images are as large as 1024 x 1024 for the autoencoder: 3 x 5 tokens if it halves 7 times
    "QwenImageEditPipeline",
    {
        "processor": lambda: text.qwen2_processor(text.qwen_tokenizer()),
        "vae": partial(vaes.qwen_image, levels=7, blocks=0),
    },
    {"height": 768, "width": 1280, "image": image(20, 12)},
)
_QWEN21 = TinyPipe(  # a text position is replaced by 2 x 2 tokens of an image, of which the processor makes as many
    "QwenImage21Pipeline",
    {
        "- text_encoder processor": lambda: text.with_processor(text.qwen3_vl(), text.qwen3_processor, 16),
        "transformer": model("qwen_image21", 2), "vae": vaes.qwen_image21, "scheduler": flow_match(),
    },
    _true_cfg(_BY_16, use_kv_cache=False), "calls",
)
_QWEN21_EDIT = _QWEN21.but(call={"image": image(96, 64), "output_resolution": 96})
_JOY = TinyPipe(  # 7 x 9 tokens, of one of the sizes that the pipeline has
    "JoyImageEditPipeline",
    {
        f"{WORDS} processor": lambda: text.with_processor(text.qwen3_vl(), text.qwen3_processor),
        "transformer": model("joyimage", 3), "scheduler": flow_match(),
        "vae": partial(vaes.wan_patches, 2, 16, 0.2, scale_factor_spatial=64, scale_factor_temporal=1),
    },
    _guided((896, 1152), 4.0), "calls",
)
_Z_IMAGE = TinyPipe(  # 5 x 7 tokens, which the class pads to 64
    "ZImagePipeline", parts_of(text.qwen3, model("z_image", 1), partial(vaes.kl, 16, levels=2)),
    _guided((20, 28), 3.0, max_sequence_length=40), "batch",
)
_Z_IMAGE_CONTROL = _Z_IMAGE.but(
    "ZImageControlNetPipeline", {"controlnet": model("control_z_image")}, {"control_image": image(20, 28)},
    controlnets=("controlnet",),
)
_GLYPHS = 'a sign that says "open"'
_MIX = partial(of, "AdaptiveProjectedMixGuidance")
_HUNYUAN = TinyPipe(
    "HunyuanImagePipeline",
    {
        WORDS: partial(text.qwen25_vl, 3), WORDS_2: partial(text.byt5, 8), "scheduler": flow_match(shift=5.0),
        "guider": _MIX(adaptive_projected_guidance_start_step=0), "vae": vaes.hunyuan_image,
        "ocr_guider": _MIX(adaptive_projected_guidance_start_step=1),
        "transformer": model("hunyuan_image", 2, guidance_embeds=False, use_meanflow=False),
    },
    _asked(_BY_4, negative_prompt=_NEGATIVE), "calls",
    prepare=_with(tokenizer_max_length=37, tokenizer_2_max_length=21),  # its texts are padded to 1000 and 128 else
)
_KANDINSKY = TinyPipe(  # the pipeline's own resolutions are of about 1024 x 1024
    "Kandinsky5T2IPipeline",
    {
        "- text_encoder tokenizer": lambda: text.with_processor(text.qwen25_vl(), text.qwen2_processor),
        WORDS_2: partial(text.clip, 8, heads=2), "transformer": model("kandinsky5"), "vae": vaes.kl,
        "scheduler": flow_match(shift=3.0),
    },
    _guided(_BY_8, 4.0, max_sequence_length=61), "calls", output="image", prepare=_with(resolutions=[(80, 48)]),
)


def _edited() -> Image.Image:
    torch.manual_seed(5)  # the pipeline draws from its autoencoder without the generator that it is given
    return image(7, 9)


def _composed(steps: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def apply(value: Any) -> Any:
        for step in steps:
            value = step(value)
        return value

    return apply


def _to_tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture, dtype=np.float32) / 255).permute(2, 0, 1)


def _without_torchvision() -> Any:
    """OmniGen's tokenizer; its processor gets the four functions of torchvision that it uses."""
    from diffusers.pipelines.omnigen import pipeline_omnigen, processor_omnigen

    processor_omnigen.transforms = SimpleNamespace(
        Compose=_composed,
        Lambda=lambda function: function,
        ToTensor=lambda: _to_tensor,
        Normalize=lambda mean, std, inplace: lambda x: (x - mean[0]) / std[0],
    )
    pipeline_omnigen.OmniGenMultiModalProcessor = processor_omnigen.OmniGenMultiModalProcessor
    return text.llama_tokenizer(1024)


_OMNIGEN = TinyPipe(  # the class takes the positions of the first sample for all
    "OmniGenPipeline",
    {
        "tokenizer": _without_torchvision, "vae": vaes.kl, "scheduler": flow_match(invert_sigmas=True),
        "transformer": lambda: model("omnigen", 2, vocab_size=len(text.llama_tokenizer()))(),
    },
    {**_asked(_BY_8, prompt="a cat"), "guidance_scale": 3.0}, "batch",
)
_LANGUAGE = {
    "qwen_image": _QWEN,
    "qwen_image_two_prompts": _QWEN.but(call=_TWO_PROMPTS),  # of two lengths: with a mask for the text
    "qwen_image_img2img": _QWEN.but("QwenImageImg2ImgPipeline", call=_img2img(_BY_4)),
    "qwen_image_inpaint": _QWEN.but(
        "QwenImageInpaintPipeline", call={**_img2img(_BY_4), "mask_image": _mask(_BY_4)}
    ),
    "qwen_image_controlnet": _QWEN.but(
        "QwenImageControlNetPipeline", {"controlnet": model("control_qwen_image", 2, extra_condition_channels=0)},
        {"control_image": image(*_BY_4), "controlnet_conditioning_scale": 0.7}, controlnets=("controlnet",),
    ),
    "qwen_image_edit": _QWEN_EDIT,
    "qwen_image_edit_plus": _QWEN_EDIT.but(
        "QwenImageEditPlusPipeline", call={"image": [image(20, 12), image(12, 20, seed=2)]}
    ),
    "qwen_image21": _QWEN21,
    "qwen_image21_edit": _QWEN21_EDIT,
    # Kept keys are refused with cfg above 1, so "none": these are not tried with it.
    "qwen_image21_kept": _QWEN21.but(call={"use_kv_cache": True}, guidance="none"),
    "qwen_image21_edit_kept": _QWEN21_EDIT.but(call={"use_kv_cache": True}, guidance="none"),
    "joyimage": _JOY,
    "joyimage_edit": _JOY.but(call={"image": _edited}),
    "joyimage_plus": _JOY.but(  # 3 x 5 tokens
        "JoyImageEditPlusPipeline", {"transformer": model("joyimage_plus", 3)},
        {"height": 384, "width": 640, "images": [image(7, 9)]}, guidance="batch",
    ),
    "z_image": _Z_IMAGE,
    "z_image_img2img": _Z_IMAGE.but("ZImageImg2ImgPipeline", call=_img2img((20, 28))),
    "z_image_controlnet": _Z_IMAGE_CONTROL,
    "z_image_controlnet_twice": _Z_IMAGE_CONTROL.but(  # its control layers run twice, so it stays whole
        parts={"controlnet": model("control_z_image", add_control_noise_refiner="control_layers")}, controlnets=()
    ),
    "hunyuan_image": _HUNYUAN,
    "hunyuan_image_glyphs": _HUNYUAN.but(call={"prompt": _GLYPHS}),
    "hunyuan_image_distilled": _HUNYUAN.but(
        parts={
            "transformer": model("hunyuan_image", 2, guidance_embeds=True, use_meanflow=True),
            "guider ocr_guider": lambda: (None, None),
        },
        call={"prompt": _GLYPHS, "negative_prompt": ..., "distilled_guidance_scale": 3.25}, guidance="none",
    ),
    "kandinsky5_t2i": _KANDINSKY,
    "kandinsky5_i2i": _KANDINSKY.but(
        "Kandinsky5I2IPipeline", {"transformer": model("kandinsky5", visual_cond=True)}, {"image": image(*_BY_8)}
    ),
    "omnigen": _OMNIGEN,
    "omnigen_images": _OMNIGEN.but(  # one image for the first prompt and two for the second: three branches
        call={
            "prompt": [
                "draw <img><|image_1|></img>", "mix <img><|image_1|></img> and <img><|image_2|></img> blurry",
            ],
            "input_images": [[image(32, 48)], [image(32, 32, seed=2), image(48, 32, seed=3)]],
            "img_guidance_scale": 1.6, "max_input_image_size": 64,
        }
    ),
    "glm_image": TinyPipe(  # with the tokens that its language model would give; 6 x 10 tokens
        "GlmImagePipeline",
        parts_of(
            text.byt5, model("glm_image", 2), processor=lambda: None, vision_language_encoder=lambda: None
        ),
        _asked(
            _BY_16, prompt=_GLYPHS, guidance_scale=3.0, **_cfg_embeds(11, 16),
            prior_token_ids=torch.randint(0, 64, (1, 60), generator=torch.Generator().manual_seed(4)),
        ),
        "calls",
    ),
    "ernie_image": TinyPipe(  # the pipeline takes the autoencoder to make images 16 times smaller
        "ErnieImagePipeline",
        parts_of(
            partial(text.mistral3, causal_lm=False), model("ernie_image", 2, in_channels=16, out_channels=16),
            vaes.flux2, quiet_steps("FlowMatchEulerDiscreteScheduler"),
        ),
        _guided(_BY_8, 4.0), "batch",
    ),
    "ideogram4": TinyPipe(  # a second transformer computes the branch without text; the layers of text are fixed
        "Ideogram4Pipeline",
        parts_of(
            partial(text.qwen3_vl, 8, 36, 1, causal_lm=False), model("ideogram4", 2, llm_features_dim=8 * 13),
            vaes.flux2, unconditional_transformer=model("ideogram4", 2, llm_features_dim=8 * 13),
        ),
        _asked(_BY_8, guidance_schedule=[7.0, 3.0], max_sequence_length=27), "calls",
        transformers=("transformer", "unconditional_transformer"),
    ),
    "krea2": TinyPipe(
        "Krea2Pipeline",
        parts_of(
            partial(text.qwen3_vl, causal_lm=False), model("krea2", 2), vaes.qwen_image,
            flow_match(use_dynamic_shifting=True, max_image_seq_len=6400),
            text_encoder_select_layers=lambda: (0, 1, 2),
        ),
        _guided(_BY_4, 4.5, max_sequence_length=21), "calls",
    ),
    "nucleus_moe": TinyPipe(
        "NucleusMoEImagePipeline",
        {
            "- text_encoder processor": lambda: text.with_processor(text.qwen3_vl(), text.qwen3_processor),
            "transformer": model("nucleus_moe", 2), "vae": vaes.qwen_image, "scheduler": flow_match(),
        },
        _guided(_BY_4, 4.0, max_sequence_length=128, return_index=-1), "calls",
    ),
}
TINY = {**_FLUXES, **_OTHERS, **_LANGUAGE}
