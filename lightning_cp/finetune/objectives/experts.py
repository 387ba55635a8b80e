"""The objective of a family, also of experts for different noise levels: one of them is drawn for each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_cp.data import RandomStream, keyed_generator
from lightning_cp.finetune.families import Family
from lightning_cp.finetune.objectives.diffusion import Diffusion
from lightning_cp.finetune.objectives.flow import FlowMatching, unshifted
from lightning_cp.finetune.objectives.objective import Objective
from lightning_cp.finetune.settings import check_ranges
from lightning_cp.training.noise import FirstIndex

_LEAST = 0.002  # smaller probabilities need too many draws for a time of the interval


@dataclass(frozen=True, kw_only=True)
class ExpertFlowMatching(FlowMatching):
    """Flow matching of several experts, each on its own sigma interval, in one run.

    One expert is drawn for each step, for the whole global batch, from (seed, step): it is the same on all ranks and
    after a resume. Its probability is that of its interval, and the times of the step are those that `FlowMatching`
    draws from this interval. Over many steps, times have the distribution of a run on all intervals together.

    Args:
        ranges: (lowest, highest] sigma of each expert, after the shift, by its name in the pipeline. They must not
            overlap; noise levels between them are not trained.
        shift: a factor. A rule that depends on the sample would make the probabilities depend on the data.
    Raises: ValueError: an interval is empty, overlaps another one or has a probability below 0.002; another shift.
    """

    ranges: Mapping[str, tuple[float, float]]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.shift, (int, float)):
            raise ValueError(
                f"shift={self.shift} must be a factor to train several experts: their probabilities must not depend on "
                "the sizes of the samples"
            )
        if self.sigma_range != (0.0, 1.0):
            raise ValueError(f"sigma_range={self.sigma_range} is set, but each expert has its own: use ranges")
        check_ranges(self.ranges)
        for name, (low, high) in self._ascending:
            if self._mass(name) < _LEAST:
                raise ValueError(
                    f"{name} would be trained in {self._mass(name):.2g} of the steps: the probability of its sigma "
                    f"range ({low:g}, {high:g}) must be at least {_LEAST}. Widen the range, change the density "
                    f"({self.density}) or the shift ({self.shift:g}), or train the other expert alone"
                )

    @cached_property
    def probabilities(self) -> dict[str, float]:
        """Probability of each expert to be drawn for a step, in the order of ascending sigma."""
        total = sum(map(self._mass, self.ranges))
        return {name: self._mass(name) / total for name, _ in self._ascending}

    @cached_property
    def objectives(self) -> dict[str, FlowMatching]:
        """Objective of each expert when it is trained alone."""
        shared = {field.name: getattr(self, field.name) for field in fields(FlowMatching)}
        return {name: FlowMatching(**{**shared, "sigma_range": (low, high)}) for name, (low, high) in self._ascending}

    def expert_at(self, step: int) -> str:
        """Return the name of the expert that a step trains."""
        return self.expert_of(keyed_generator(self.seed, RandomStream.EXPERT, step=step).random())[0]

    def expert_of(self, p: float) -> tuple[str, float]:
        """Return the expert that has the p-quantile of all times, and the quantile of the expert's times that it is.

        Args: p: in [0, 1).
        """
        below = 0.0
        for name, probability in self.probabilities.items():
            last, within = name, (p - below) / probability
            if within < 1:
                break
            below += probability
        return last, min(max(within, 0.0), 1.0)  # sums are rounded

    @override
    def times(self, family: Family, clean: Tensor, *, step: int, first_index: FirstIndex) -> Tensor:
        return self.objectives[self.expert_at(step)].times(family, clean, step=step, first_index=first_index)

    @override
    def times_at(self, family: Family, clean: Tensor, p: float) -> Tensor:
        name, within = self.expert_of(p)
        return self.objectives[name].times_at(family, clean, within)

    @property
    def _ascending(self) -> list[tuple[str, tuple[float, float]]]:
        return sorted(((name, (low, high)) for name, (low, high) in self.ranges.items()), key=lambda one: one[1])

    def _mass(self, name: str) -> float:
        """Return the probability of an expert's interval among all times."""
        assert isinstance(self.shift, (int, float)), "checked before"
        low, high = (self.density.cdf(unshifted(sigma, self.shift)) for sigma in self.ranges[name])
        return high - low


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
