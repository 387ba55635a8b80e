"""The objective of a family's pretrained weights."""

from __future__ import annotations

from typing import Any

from lightning_cp.finetune.families import Family
from lightning_cp.finetune.objectives.diffusion import Diffusion
from lightning_cp.finetune.objectives.flow import FlowMatching
from lightning_cp.finetune.objectives.objective import Objective


def objective_for(family: Family, *, seed: int, component: str = "transformer", **settings: Any) -> Objective:
    """Return the objective that fits a family's pretrained weights.

    Args:
        component: name of the trained transformer in its pipeline. One of two experts (Wan 2.2) is trained on the noise
            levels at which the pipeline uses it, unless `sigma_range` is given.
        settings: other arguments of `FlowMatching` or `Diffusion`.
    """
    if family.objective.prediction != "flow":
        return Diffusion(seed=seed, **settings)
    return FlowMatching(seed=seed, **{"sigma_range": family.sigma_range(component), **settings})
