"""Model families of this package, by name, and which side models they train. Imports neither torch nor diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES = {  # name of the family -> its module and class, imported when first needed, and the pipeline's class name
    "flux": ("image.flux", "Flux", "FluxPipeline"),
    "flux_controlnet": ("image.controlnet", "FluxControlNet", "FluxControlNetPipeline"),
    "flux_kontext": ("image.flux", "FluxKontext", "FluxKontextPipeline"),
    "flux2": ("image.flux2", "Flux2", "Flux2Pipeline"),
    "flux2_klein": ("image.flux2", "Flux2Klein", "Flux2KleinPipeline"),
    "krea2": ("image.krea2", "Krea2", "Krea2Pipeline"),
    "ltx": ("video.ltx", "LTX", "LTXPipeline"),
    "ltx_condition": ("video.ltx", "LTXCondition", "LTXConditionPipeline"),
    "ltx_image_to_video": ("video.ltx", "LTXImageToVideo", "LTXImageToVideoPipeline"),
    "ltx2": ("video.ltx2", "LTX2", "LTX2Pipeline"),
    "ltx2_image_to_video": ("video.ltx2", "LTX2ImageToVideo", "LTX2ImageToVideoPipeline"),
    "minimax_h3": ("video.minimax_h3", "MiniMaxH3", "MiniMaxH3ModularPipeline"),
    "wan": ("video.wan", "Wan", "WanPipeline"),
    "wan_image_to_video": ("video.wan_image", "WanImageToVideo", "WanImageToVideoPipeline"),
    "wan_vace": ("video.wan_vace", "WanVACE", "WanVACEPipeline"),
    "cogvideox": ("video.cogvideox", "CogVideoX", "CogVideoXPipeline"),
    "cogvideox_image_to_video": ("video.cogvideox", "CogVideoXImageToVideo", "CogVideoXImageToVideoPipeline"),
    "sd3": ("image.sd3", "StableDiffusion3", "StableDiffusion3Pipeline"),
    "qwen_image": ("image.qwen_image", "QwenImage", "QwenImagePipeline"),
    "qwen_image_controlnet": ("image.controlnet", "QwenImageControlNet", "QwenImageControlNetPipeline"),
    "qwen_image_edit": ("image.qwen_image_edit", "QwenImageEdit", "QwenImageEditPipeline"),
    "qwen_image_edit_plus": ("image.qwen_image_edit", "QwenImageEditPlus", "QwenImageEditPlusPipeline"),
    "z_image": ("image.z_image", "ZImage", "ZImagePipeline"),
    "sana": ("image.sana", "Sana", "SanaPipeline"),
    "sana_video": ("video.sana_video", "SanaVideo", "SanaVideoPipeline"),
    "hunyuan_video": ("video.hunyuan_video", "HunyuanVideo", "HunyuanVideoPipeline"),
    "hunyuan_video15": ("video.hunyuan_video", "HunyuanVideo15", "HunyuanVideo15Pipeline"),
    "hunyuan_video15_image_to_video": (
        "video.hunyuan_video",
        "HunyuanVideo15ImageToVideo",
        "HunyuanVideo15ImageToVideoPipeline",
    ),
    "pixart_sigma": ("image.pixart", "PixArtSigma", "PixArtSigmaPipeline"),
}


def family_of_pipeline(kind: object) -> str | None:
    """Return the name of the family of a pipeline's class, also of a modular one; None if it is not in the table.

    Args: kind: the name of the class.
    """
    by_pipeline = {pipeline: name for name, (_, _, pipeline) in FAMILIES.items()}
    return by_pipeline.get(str(kind)) or by_pipeline.get(str(kind).replace("Modular", ""))


_EXPERIMENTS = {  # families that share an experiment, or have one of another name than finetune_<family>
    "flux_kontext": ("kontext",),
    "flux2_klein": ("flux2",),
    "ltx_condition": ("ltx",),
    "qwen_image_edit_plus": ("qwen_image_edit",),
    "wan": ("wan", "wan22"),
    "wan_image_to_video": ("wan", "wan22"),
}


def experiments_of(family: str) -> list[str]:
    """Return the experiments of lightning-cp train that are for a family."""
    names = _EXPERIMENTS.get(family) or (family.removesuffix("_image_to_video"),)
    return [f"finetune_{name}" for name in names]


PLAIN_PIPELINES = {  # modular pipelines with another name than the pipeline that is not modular
    "Flux2KleinBaseModularPipeline": "Flux2KleinPipeline",
    "Wan22ModularPipeline": "WanPipeline",
    "WanImage2VideoModularPipeline": "WanImageToVideoPipeline",
    "Wan22Image2VideoModularPipeline": "WanImageToVideoPipeline",
}


CONTROLNET = "controlnet"  # name of the component
VACE = "vace_"  # begin of the names of the weights that are trained in a transformer with VACE
_TRAINED = ("FluxControlNetModel", "QwenImageControlNetModel")
_OTHER_KINDS = {
    "num_mode": "it is a union of several kinds of control (num_mode); data have no mode of each sample",
    "conditioning_embedding_channels": "it takes pixels (conditioning_embedding_channels), not latents of the control",
    "extra_condition_channels": "it is for inpainting (extra_condition_channels): data have no mask of each sample",
}
_WIDTH = ("num_attention_heads", "attention_head_dim")


def controlnet_error(kind: str, config: Mapping[str, Any], transformer: Mapping[str, Any]) -> str | None:
    """Return why a ControlNet cannot be trained; None if it can.

    Args: kind: its class name. config: its config. transformer: the config of the pipeline's transformer.
    """
    if kind not in (*_TRAINED, "ConfigOnly"):  # of a pipeline that is loaded without its weights
        return f"the controlnet is a {kind}, but must be one model: {' or '.join(_TRAINED)}"
    for key, reason in _OTHER_KINDS.items():
        if config.get(key):
            return f"the controlnet has no family for training: {reason}"
    for key in _WIDTH:
        if key in config and key in transformer and config[key] != transformer[key]:
            return (
                f"the controlnet has {key}={config[key]}, but the transformer has {transformer[key]}: make it with "
                f"from_transformer(..., {key}={transformer[key]})"
            )
    return None
