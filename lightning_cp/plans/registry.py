"""Which plan belongs to which model class."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lightning_cp.plans import cogvideox, flux, hunyuan_video, ltx, pixart, qwen_image, sd3, wan
from lightning_cp.plans.plan import Plan

_FAMILIES = (cogvideox, flux, hunyuan_video, ltx, pixart, qwen_image, sd3, wan)

# By name, so that diffusers is imported only by those who use it; the class must come from diffusers.
REGISTERED: Mapping[str, Plan] = MappingProxyType(
    {name: plan for family in _FAMILIES for name, plan in family.PLANS.items()}
)


def registered_plan(kind: type) -> Plan | None:
    """The plan of a model class, or of the nearest class it derives from; None where there is none."""
    for base in kind.__mro__:
        if base.__module__.split(".")[0] == "diffusers" and base.__name__ in REGISTERED:
            return REGISTERED[base.__name__]
    return None
