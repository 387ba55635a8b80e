"""The draw of an expert for each step, and the times of its noise levels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_cp.families import Family, ObjectiveDefaults, ResolutionShift, family_for
from lightning_cp.finetune.objectives.flow import unshifted
from lightning_cp.objectives import ExpertFlowMatching, FlowMatching, LogitNormal, Uniform, objective_for
from lightning_cp.recipes.digits.family import LabelledClips
from tests.families.cases import made

RANGES = {"transformer": (0.875, 1.0), "transformer_2": (0.0, 0.875)}
SETTINGS: dict[str, Any] = {"seed": 3, "shift": 3.0, "density": LogitNormal(0.2, 0.9)}
CLEAN = torch.zeros(4, 1, 3, 2, 2)


def family(**defaults: Any) -> Family:
    built = LabelledClips({"num_classes": 10})
    built.objective = ObjectiveDefaults(**defaults)  # type: ignore[misc]
    return built


def experts(ranges: dict[str, tuple[float, float]] = RANGES, **settings: Any) -> ExpertFlowMatching:
    return ExpertFlowMatching(ranges=ranges, **{**SETTINGS, **settings})


def times_of(objective: FlowMatching, steps: int) -> Tensor:
    return torch.cat([objective.times(family(), CLEAN[:2], step=step, first_index=0) for step in range(steps)])


@pytest.mark.parametrize("ranges", [RANGES, {"transformer": (0.9, 1.0), "transformer_2": (0.1, 0.7)}], ids=str)
def test_experts_are_drawn_with_the_probability_of_their_times(ranges: dict[str, tuple[float, float]]) -> None:
    objective, steps = experts(ranges), 4000
    drawn = [objective.expert_at(step) for step in range(steps)]
    assert sum(objective.probabilities.values()) == pytest.approx(1)
    alone = times_of(FlowMatching(**SETTINGS), steps)  # of a run on all noise levels
    inside = {name: float(((alone > low) & (alone <= high)).float().mean()) for name, (low, high) in ranges.items()}
    for name, probability in objective.probabilities.items():
        deviation = math.sqrt(probability * (1 - probability) / steps)
        assert drawn.count(name) / steps == pytest.approx(probability, abs=4 * deviation)
        assert inside[name] / sum(inside.values()) == pytest.approx(probability, abs=4 * deviation)


def test_the_times_of_all_steps_have_the_density_of_one_run() -> None:
    objective = experts()
    times = times_of(objective, 2000).double().sort().values
    expected = [SETTINGS["density"].cdf(unshifted(float(x), SETTINGS["shift"])) for x in times]
    found = np.arange(1, len(times) + 1) / len(times)
    # Kolmogorov and Smirnov: below 1.95 / sqrt(n) with a probability of 99.9 %; two times of a step are not independent
    assert np.abs(found - expected).max() < 1.95 / math.sqrt(len(times) / 2)


def test_a_step_has_the_times_of_its_expert_alone() -> None:
    objective, names = experts(), set[str]()
    for step in range(20):
        name = objective.expert_at(step)
        alone = FlowMatching(**SETTINGS, sigma_range=RANGES[name])
        expected = alone.times(family(), CLEAN, step=step, first_index=5)
        assert torch.equal(objective.times(family(), CLEAN, step=step, first_index=5), expected)
        names.add(name)
    assert names == {*RANGES}


def test_the_draw_depends_on_seed_and_step_only() -> None:
    first, turned = experts(), experts(dict(reversed(RANGES.items())), cond_dropout=0.5)
    late = [experts().expert_at(step) for step in reversed(range(50))][::-1]
    assert [first.expert_at(step) for step in range(50)] == [turned.expert_at(step) for step in range(50)] == late
    assert late != [experts(seed=4).expert_at(step) for step in range(50)]


def test_quantiles_are_those_of_one_run_and_name_their_expert() -> None:
    objective, whole = experts(), FlowMatching(**SETTINGS)
    for p in (0.05, 0.5, 0.7, 0.8, 0.999):
        expected = float(whole.times_at(family(), CLEAN, p)[0])
        assert float(objective.times_at(family(), CLEAN, p)[0]) == pytest.approx(expected, rel=1e-6)
        assert objective.expert_of(p)[0] == ("transformer" if expected > 0.875 else "transformer_2")
    gap = experts({"high": (0.9, 1.0), "low": (0.1, 0.7)})
    found = [float(gap.times_at(family(), CLEAN, p)[0]) for p in np.linspace(0.001, 0.999, 50)]
    assert found == sorted(found)
    assert not [x for x in found if 0.7001 < x < 0.8999 or x < 0.0999]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"ranges": {"a": (0.5, 1.0), "b": (0.0, 0.6)}},
            "the sigma ranges of b and a overlap: b ends at 0.6, and a begi",
        ),
        ({"ranges": {"a": (0.5, 1.0), "b": (0.5, 1.0)}}, "the sigma ranges of a and b overlap"),
        ({"ranges": {"a": (0.5, 1.2), "b": (0.0, 0.5)}}, r"the sigma range \[0.5, 1.2\] of a must be"),
        ({"ranges": {"a": (0.5, 0.5), "b": (0.0, 0.5)}}, r"the sigma range \[0.5, 0.5\] of a must be"),
        (
            {"density": Uniform(), "shift": 0.001},
            "transformer would be trained in 0.00014 of the steps: the probability",
        ),
        ({"shift": None}, "shift=None must be a factor to train several experts"),
        ({"shift": ResolutionShift()}, "must be a factor to train several experts"),
        ({"sigma_range": (0.5, 1.0)}, "sigma_range=.* is set, but each expert has its own: use ranges"),
    ],
)
def test_ranges_that_cannot_be_drawn_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        experts(**settings)


@pytest.mark.parametrize("case", ["wan_two_experts", "wan_image_two_experts"])
def test_the_default_ranges_and_shift_are_those_of_the_pipeline(case: str) -> None:
    objective = objective_for(family_for(made(case)), seed=0, component=["transformer", "transformer_2"])
    assert isinstance(objective, ExpertFlowMatching)
    assert (objective.ranges, objective.shift) == (RANGES, 3.0)  # flow_shift of the scheduler
    # shifted by 3, sigma 0.875 is 0.7 before: P(logit > log(0.7 / 0.3))
    assert objective.probabilities["transformer"] == pytest.approx(0.198, abs=1e-3)
    given = objective_for(
        family_for(made(case)), seed=0, component=["transformer", "transformer_2"], sigma_range=[[0.8, 1], [0, 0.8]]
    )
    assert isinstance(given, ExpertFlowMatching)
    assert given.ranges == {"transformer": (0.8, 1.0), "transformer_2": (0.0, 0.8)}


@pytest.mark.parametrize(
    ("case", "settings", "message"),
    [
        (
            "wan",
            {},
            "the wan pipeline has no boundary_ratio, so the noise levels of transformer, transformer_2 are not",
        ),
        ("wan_two_experts", {"sigma_range": [[0.5, 1.0]]}, "must have a pair for each of transformer, transformer_2"),
        ("cogvideox", {}, "cogvideox predicts epsilon: its transformers are no experts"),
    ],
)
def test_a_pipeline_without_experts_is_refused(case: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        objective_for(family_for(made(case)), seed=0, component=["transformer", "transformer_2"], **settings)
