"""Which plan belongs to which model class: every other file of this folder has a table of them, `PLANS`."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import MappingProxyType

from lightning_cp.plans.plan import Plan
from lightning_cp.plans.refused import REFUSED, REFUSED_MODULES

_NOT_FAMILIES = ("plan", "refused", "registry")


def _registered() -> Iterator[tuple[str, Plan]]:
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(import_module(package).__path__):
        if module.name not in _NOT_FAMILIES:
            yield from import_module(f"{package}.{module.name}").PLANS.items()


# By name, so that diffusers is imported only by those who use it; the class must come from diffusers.
REGISTERED: Mapping[str, Plan] = MappingProxyType(dict(_registered()))


def registered_plan(kind: type) -> Plan | None:
    """The plan of a model class, or of the nearest class it derives from; None where there is none."""
    for base in kind.__mro__:
        if base.__module__.split(".")[0] == "diffusers" and base.__name__ in REGISTERED:
            return REGISTERED[base.__name__]
    return None


def refusal(kind: type) -> str | None:
    """Why a class of diffusers, or one derived from it, can have no plan; None where nothing is known of it."""
    for base in kind.__mro__:
        if base.__module__.split(".")[0] == "diffusers" and base.__name__ in REFUSED:
            return REFUSED[base.__name__]
        for prefix, reason in REFUSED_MODULES.items():  # models, not the parts that they share with VAEs
            if base.__module__.startswith(prefix) and any(x.__name__ == "ModelMixin" for x in base.__mro__):
                return reason
    return None
