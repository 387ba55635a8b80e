"""diffusers' step caches on a parallel model: every rank takes the decision that one process would take."""

from lightning_cp.engine.caches.step_caches import StepCaches
from lightning_cp.engine.caches.table import CACHES, Cache

__all__ = ["CACHES", "Cache", "StepCaches"]
