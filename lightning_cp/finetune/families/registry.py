"""Find the family of a pipeline, or of a stored data set."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lightning_cp.errors import FamilyError
from lightning_cp.finetune.families.family import Facts, Family
from lightning_cp.finetune.family_table import FAMILIES

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
    ours = {pipeline: name for name, (_, _, pipeline) in FAMILIES.items()}
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
    if name not in FAMILIES:
        raise FamilyError(
            f"there is no family {name!r}, only {', '.join(sorted({*FAMILIES, *_REGISTERED}))}; a family from another "
            "package must be registered (register_family) before it is loaded"
        )
    return _import(name)(facts)


def pipelines() -> list[str]:
    """Return the class names of all pipelines with a family."""
    registered = (pipeline for family in _REGISTERED.values() for pipeline in family.pipelines)
    return sorted({*(pipeline for _, _, pipeline in FAMILIES.values()), *registered})


def _import(name: str) -> type[Family]:
    module, kind, _ = FAMILIES[name]
    family: type[Family] = getattr(import_module(f"lightning_cp.finetune.families.{module}"), kind)
    return family
