"""Find the family of a pipeline, or of a stored data set."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lightning_cp.errors import FamilyError
from lightning_cp.families.family import Facts, Family

_OURS = {  # name of the family -> its module and class, imported when first needed, and the pipeline's class name
    "flux": ("flux", "Flux", "FluxPipeline"),
    "flux_kontext": ("flux", "FluxKontext", "FluxKontextPipeline"),
    "wan": ("wan", "Wan", "WanPipeline"),
    "wan_image_to_video": ("wan_image", "WanImageToVideo", "WanImageToVideoPipeline"),
    "cogvideox": ("cogvideox", "CogVideoX", "CogVideoXPipeline"),
    "cogvideox_image_to_video": ("cogvideox", "CogVideoXImageToVideo", "CogVideoXImageToVideoPipeline"),
    "sd3": ("sd3", "StableDiffusion3", "StableDiffusion3Pipeline"),
    "qwen_image": ("qwen_image", "QwenImage", "QwenImagePipeline"),
}
_REGISTERED: dict[str, type[Family]] = {}  # by the pipeline's class name


def register_family(family: type[Family]) -> type[Family]:
    """Register a family for its pipelines' class names, in place of earlier ones; can be used as a class decorator."""
    for name in ("name", "pipelines", "components"):
        if not hasattr(family, name):
            raise FamilyError(f"{family.__name__}.{name} must be set, see lightning_cp.families.Family")
    _REGISTERED.update(dict.fromkeys(family.pipelines, family))
    return family


def family_for(pipe: Any) -> Family:
    """Return the family of a pipeline, bound to its configs.

    Raises: FamilyError: no family is registered for its class or a parent class.
    """
    ours = {pipeline: name for name, (_, _, pipeline) in _OURS.items()}
    for kind in type(pipe).__mro__:
        if kind.__name__ in _REGISTERED:
            family = _REGISTERED[kind.__name__]
        elif kind.__name__ in ours:
            family = _import(ours[kind.__name__])
        else:
            continue
        return family(family.read_facts(pipe))
    raise FamilyError(
        f"no family is registered for {type(pipe).__name__}, only for {', '.join(pipelines())}: add one with "
        "lightning_cp.families.register_family, see docs/families.md"
    )


def load_family(name: str, facts: Facts) -> Family:
    """Rebuild a family from its `name` and `facts`, for example from the file beside a stored data set.

    Raises: FamilyError: there is no family of this name.
    """
    for family in _REGISTERED.values():
        if family.name == name:
            return family(facts)
    if name not in _OURS:
        known = sorted({*_OURS, *(family.name for family in _REGISTERED.values())})
        raise FamilyError(f"there is no family {name!r}, only {', '.join(known)}")
    return _import(name)(facts)


def pipelines() -> list[str]:
    """Return the class names of all pipelines with a family."""
    return sorted({*(pipeline for _, _, pipeline in _OURS.values()), *_REGISTERED})


def _import(name: str) -> type[Family]:
    module, kind, _ = _OURS[name]
    family: type[Family] = getattr(import_module(f"lightning_cp.families.{module}"), kind)
    return family
