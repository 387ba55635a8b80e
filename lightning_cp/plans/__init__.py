"""Plans: the type, the registry, and one small file of data for each model family."""

from lightning_cp.plans.plan import (
    LOCAL,
    Attention,
    Count,
    Mask,
    Pad,
    Plan,
    Spec,
    Split,
    Streams,
    Whole,
    count,
    mask,
    split,
)
from lightning_cp.plans.registry import REGISTERED, registered_plan

__all__ = [
    "LOCAL",
    "REGISTERED",
    "Attention",
    "Count",
    "Mask",
    "Pad",
    "Plan",
    "Spec",
    "Split",
    "Streams",
    "Whole",
    "count",
    "mask",
    "registered_plan",
    "split",
]
