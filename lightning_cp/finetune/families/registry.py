"""Find the family of a pipeline, or of a stored data set."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lightning_cp.errors import FamilyError
from lightning_cp.finetune.families.family import Facts, Family

_OURS = {  # name of the family -> its module and class, imported when first needed, and the pipeline's class name
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
    "hunyuan_video": ("video.hunyuan_video", "HunyuanVideo", "HunyuanVideoPipeline"),
    "hunyuan_video15": ("video.hunyuan_video", "HunyuanVideo15", "HunyuanVideo15Pipeline"),
    "hunyuan_video15_image_to_video": (
        "video.hunyuan_video",
        "HunyuanVideo15ImageToVideo",
        "HunyuanVideo15ImageToVideoPipeline",
    ),
    "pixart_sigma": ("image.pixart", "PixArtSigma", "PixArtSigmaPipeline"),
}
_REGISTERED: dict[str, type[Family]] = {}  # by the family's name


def register_family(family: type[Family]) -> type[Family]:
    """Register a family for its name and its pipelines' class names; can be used as a class decorator.

    It takes the place of earlier families with this name or pipeline.
    """
    for name in ("name", "pipelines", "components"):
        if not hasattr(family, name):
            raise FamilyError(f"{family.__name__}.{name} must be set, see lightning_cp.families.Family")
    _REGISTERED.pop(family.name, None)
    _REGISTERED[family.name] = family  # at the end: the latest one is found first
    return family


def family_for(pipe: Any) -> Family:
    """Return the family of a pipeline, bound to its configs.

    Raises: FamilyError: no family is registered for its class or a parent class.
    """
    family = family_class(type(pipe))
    return family(family.read_facts(pipe))


def family_class(pipeline: type) -> type[Family]:
    """Return the family's class for a pipeline class. Raises: FamilyError: there is none for it or a parent class."""
    ours = {pipeline: name for name, (_, _, pipeline) in _OURS.items()}
    registered = {pipeline: family for family in _REGISTERED.values() for pipeline in family.pipelines}
    for kind in pipeline.__mro__:
        if kind.__name__ in registered:
            return registered[kind.__name__]
        if kind.__name__ in ours:
            return _import(ours[kind.__name__])
    raise FamilyError(
        f"no family is registered for {pipeline.__name__}, only for {', '.join(pipelines())}: add one with "
        "lightning_cp.families.register_family, see docs/families.md"
    )


def load_family(name: str, facts: Facts) -> Family:
    """Rebuild a family from its `name` and `facts`, for example from the file next to a stored data set.

    Raises: FamilyError: there is no family of this name.
    """
    if name in _REGISTERED:
        return _REGISTERED[name](facts)
    if name not in _OURS:
        raise FamilyError(
            f"there is no family {name!r}, only {', '.join(sorted({*_OURS, *_REGISTERED}))}; a family from another "
            "package must be registered (register_family) before it is loaded"
        )
    return _import(name)(facts)


def pipelines() -> list[str]:
    """Return the class names of all pipelines with a family."""
    registered = (pipeline for family in _REGISTERED.values() for pipeline in family.pipelines)
    return sorted({*(pipeline for _, _, pipeline in _OURS.values()), *registered})


def _import(name: str) -> type[Family]:
    module, kind, _ = _OURS[name]
    family: type[Family] = getattr(import_module(f"lightning_cp.finetune.families.{module}"), kind)
    return family
