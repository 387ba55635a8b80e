"""Plans: the type, the registry, and one small file of data for each model family."""

from lightning_cp.plans.plan import LOCAL, Pad, Plan, Spec, Split, Streams, split
from lightning_cp.plans.registry import REGISTERED, registered_plan

__all__ = ["LOCAL", "REGISTERED", "Pad", "Plan", "Spec", "Split", "Streams", "registered_plan", "split"]
