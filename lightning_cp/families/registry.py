"""Find the family of a pipeline, or of a stored data set."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lightning_cp.errors import FamilyError
from lightning_cp.families.family import Facts, Family

_OURS = {  # class name of a pipeline -> module and class; imported when first needed
    "FluxPipeline": ("flux", "Flux"),
    "FluxKontextPipeline": ("flux", "FluxKontext"),
    "WanPipeline": ("wan", "Wan"),
    "WanImageToVideoPipeline": ("wan_image", "WanImageToVideo"),
    "CogVideoXPipeline": ("cogvideox", "CogVideoX"),
    "CogVideoXImageToVideoPipeline": ("cogvideox", "CogVideoXImageToVideo"),
    "StableDiffusion3Pipeline": ("sd3", "StableDiffusion3"),
    "QwenImagePipeline": ("qwen_image", "QwenImage"),
}
_REGISTERED: dict[str, type[Family]] = {}


def register_family(family: type[Family]) -> type[Family]:
    """Register a family for its pipelines' class names; can be used as a class decorator. It replaces earlier ones."""
    for name in ("name", "pipelines", "components"):
        if not hasattr(family, name):
            raise FamilyError(f"{family.__name__}.{name} must be set, see lightning_cp.families.Family")
    _REGISTERED.update(dict.fromkeys(family.pipelines, family))
    return family


def family_for(pipe: Any) -> Family:
    """Return the family of a pipeline, bound to its configs.

    Raises: FamilyError: no family is registered for its class or a parent class.
    """
    for kind in type(pipe).__mro__:
        family = _class_of(kind.__name__)
        if family is not None:
            return family(family.read_facts(pipe))
    raise FamilyError(
        f"no family is registered for {type(pipe).__name__}, only for {', '.join(pipelines())}: add one with "
        "lightning_cp.families.register_family, see docs/families.md"
    )


def load_family(name: str, facts: Facts) -> Family:
    """Rebuild a family from its `name` and `facts`, for example from the file beside a stored data set.

    Raises: FamilyError: there is no family of this name.
    """
    known = {}
    for pipeline in pipelines():
        family = _class_of(pipeline)
        assert family is not None, "it is listed"
        known[family.name] = family
    if name not in known:
        raise FamilyError(f"there is no family {name!r}, only {', '.join(sorted(known))}")
    return known[name](facts)


def pipelines() -> list[str]:
    """Return the class names of all pipelines with a family."""
    return sorted({*_OURS, *_REGISTERED})


def _class_of(pipeline: str) -> type[Family] | None:
    if pipeline in _REGISTERED:
        return _REGISTERED[pipeline]
    if pipeline not in _OURS:
        return None
    module, name = _OURS[pipeline]
    family: type[Family] = getattr(import_module(f"lightning_cp.families.{module}"), name)
    return family
