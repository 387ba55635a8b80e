"""The objective of a family's pretrained weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_cp.finetune.families import Family
from lightning_cp.finetune.objectives.diffusion import Diffusion
from lightning_cp.finetune.objectives.experts import ExpertFlowMatching
from lightning_cp.finetune.objectives.flow import FlowMatching
from lightning_cp.finetune.objectives.objective import Objective


def objective_for(
    family: Family, *, seed: int, component: str | Sequence[str] = "transformer", **settings: Any
) -> Objective:
    """Return the objective that fits a family's pretrained weights.

    Args:
        component: name of the trained transformer in its pipeline. One of two experts (Wan 2.2) is trained on the noise
            levels at which the pipeline uses it, unless `sigma_range` is given. Several names: of experts that are
            trained in one run, see `ExpertFlowMatching`; `sigma_range` is then a list with a pair for each of them.
        settings: other arguments of `FlowMatching` or `Diffusion`.
    Raises: ValueError: several experts, but the family has no noise levels for each of them.
    """
    if not isinstance(component, str):
        return _of_experts(family, component, seed=seed, **settings)
    if family.objective.prediction != "flow":
        return Diffusion(seed=seed, **settings)
    return FlowMatching(seed=seed, **{"sigma_range": family.sigma_range(component), **settings})


def _of_experts(
    family: Family, names: Sequence[str], *, sigma_range: Sequence[Sequence[float]] | None = None, **settings: Any
) -> ExpertFlowMatching:
    if family.objective.prediction != "flow":
        raise ValueError(f"{family.name} predicts {family.objective.prediction}: its transformers are no experts")
    used = [family.sigma_range(name) for name in names]
    if sigma_range is None and (0.0, 1.0) in used:
        raise ValueError(
            f"the {family.name} pipeline has no boundary_ratio, so the noise levels of {', '.join(names)} are not "
            "known: give sigma_range with a pair for each of them"
        )
    ranges = used if sigma_range is None else [(float(low), float(high)) for low, high in sigma_range]
    if len(ranges) != len(names):
        raise ValueError(f"sigma_range={sigma_range} must have a pair for each of {', '.join(names)}")
    return ExpertFlowMatching(
        ranges=dict(zip(names, ranges, strict=True)), **{"shift": family.objective.shift, **settings}
    )
