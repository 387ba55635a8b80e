"""Learning-rate schedules against diffusers' own, step by step."""

from __future__ import annotations

import pytest
import torch
from diffusers.optimization import get_scheduler

from lightning_cp.recipes.training.loop import Schedule

NAMES = ("linear", "cosine", "cosine_with_restarts", "polynomial")


@pytest.mark.parametrize("name", NAMES)
def test_after_the_warm_up_a_schedule_is_that_of_diffusers(name: str) -> None:
    """Its factor after n steps of the optimizer is ours for step n + 1."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_scheduler(name, optimizer, num_warmup_steps=4, num_training_steps=30, num_cycles=3)
    ours, expected = Schedule(name, 4, 30, 3), []
    for _ in range(30):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert [ours.factor(step) for step in range(5, 31)] == pytest.approx(expected[4:])
    assert [ours.factor(step) for step in range(1, 5)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("name", NAMES)
def test_the_last_factor_is_above_zero_and_stays(name: str) -> None:
    schedule = Schedule(name, 2, 10)
    assert 0 < schedule.factor(10) < 0.2
    assert {schedule.factor(step) for step in (10, 11, 400)} == {schedule.factor(10)}


def test_a_constant_rate_does_not_depend_on_the_length_of_the_run() -> None:
    factors = [[Schedule("constant", 10, steps).factor(step) for step in range(1, 30)] for steps in (5, 900)]
    assert factors[0] == factors[1]
    assert factors[0][:2] == [0.1, 0.2]
    assert set(factors[0][9:]) == {1.0}


def test_no_warm_up_begins_with_the_whole_rate() -> None:
    assert Schedule("cosine", 0, 10).factor(1) == 1.0


def test_a_warm_up_longer_than_the_schedule_is_kept() -> None:
    assert [Schedule("cosine", 10, 5).factor(step) for step in (1, 10)] == [0.1, 1.0]
