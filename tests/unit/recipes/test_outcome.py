"""Outcomes of a sweep's jobs."""

import math

import pytest

from lightning_cp.recipes.runs.outcome import Outcome, Status


@pytest.mark.parametrize(("val_loss", "objective"), [(math.nan, 0.5), (0.7, 0.7)])
def test_a_sweep_minimises_the_validation_loss_if_there_is_one(val_loss: float, objective: float) -> None:
    outcome = Outcome(0, [], {}, Status.FINISHED, "", 0, 3, 0.5, val_loss, 0.1, 100.0, 2.0, 1.0, "run")
    assert outcome.objective == objective
