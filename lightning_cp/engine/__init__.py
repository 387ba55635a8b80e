"""Run models context-parallel: install a plan on a model, intercept its attention, and remove the plan again."""

from lightning_cp.engine.apply import apply_context_parallel, installed_on, parallelize, remove_context_parallel
from lightning_cp.engine.check import Difference, PlanCheck, check_plan

__all__ = [
    "Difference",
    "PlanCheck",
    "apply_context_parallel",
    "check_plan",
    "installed_on",
    "parallelize",
    "remove_context_parallel",
]
