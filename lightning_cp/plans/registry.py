"""Registry of plans by model class, collected from the table `PLANS` in each other file of this folder."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import MappingProxyType

from lightning_cp.plans.plan import Plan
from lightning_cp.plans.refused import REFUSED, REFUSED_MODULES

_WITHOUT_PLANS = ("example_inputs", "examples", "plan", "refused", "registry")


def _registered() -> Iterator[tuple[str, Plan]]:
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(import_module(package).__path__):
        if module.name not in _WITHOUT_PLANS:
            yield from import_module(f"{package}.{module.name}").PLANS.items()


# Keyed by class name, so that diffusers is not imported here; `registered_plan` accepts only classes of diffusers.
REGISTERED: Mapping[str, Plan] = MappingProxyType(dict(_registered()))


def registered_plan(kind: type) -> Plan | None:
    """Return the plan of a model class or of its nearest base class; None if there is none."""
    for base in kind.__mro__:
        if base.__module__.split(".")[0] == "diffusers" and base.__name__ in REGISTERED:
            return REGISTERED[base.__name__]
    return None


def plan_for(model: object) -> Plan | None:
    """Return the plan of a model's class; None if there is none, or none for the model's config."""
    plan = registered_plan(type(model))
    return plan if plan is None or isinstance(plan.variant_for(getattr(model, "config", None)), Plan) else None


def refusal(kind: type) -> str | None:
    """Return the reason why a diffusers class, or a class derived from it, cannot have a plan; None if not refused."""
    for base in kind.__mro__:
        if base.__module__.split(".")[0] == "diffusers" and base.__name__ in REFUSED:
            return REFUSED[base.__name__]
        for prefix, reason in REFUSED_MODULES.items():  # models only: VAEs share other classes here
            if base.__module__.startswith(prefix) and any(x.__name__ == "ModelMixin" for x in base.__mro__):
                return reason
    return None
