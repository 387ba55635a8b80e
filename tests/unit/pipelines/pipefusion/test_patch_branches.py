"""Branches of guidance: which CFG branch computes a call, and what is kept for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from lightning_cp.errors import GuidanceError
from lightning_cp.pipelines.guidance.step_clock import StepClock
from lightning_cp.pipelines.pipefusion.runner import PatchBranches


def _branches(clock: StepClock, cfg: int = 2) -> PatchBranches:
    model_plan = SimpleNamespace(patches=SimpleNamespace(order=("image",)))
    installed = SimpleNamespace(module=nn.Module(), session=SimpleNamespace(model_plan=model_plan))
    return PatchBranches(cast(Any, installed), 2, clock, cfg)


def test_branches_take_turns_and_keep_their_owner_in_later_steps() -> None:
    clock = StepClock()
    branches = _branches(clock)
    first = [branches.current() for _ in range(3)]
    clock.end_step()
    assert [branch.owner for branch in first] == [0, 1, 0]
    assert [branches.current() for _ in range(3)] == first


def test_two_transformers_with_a_call_each_are_computed_by_both_cfg_branches() -> None:
    clock = StepClock()
    guided, guide = _branches(clock), _branches(clock)
    assert [guided.current().owner, guide.current().owner] == [0, 1]


def test_the_shares_of_a_batch_are_one_call_of_the_transformer() -> None:
    clock = StepClock()
    branches = _branches(clock)
    shares = [branches.current(owner) for owner in (0, 1)]
    assert [branch.owner for branch in shares] == [0, 1]
    assert shares[0] is not shares[1]
    clock.end_step()
    for _ in range(2):
        branches.current(0)
        branches.current(1)
    with pytest.raises(GuidanceError, match="calls its transformer 2 times in this step and 1 times before"):
        clock.end_step()


def test_a_branch_of_an_expert_frees_the_keys_of_the_others() -> None:
    clock = StepClock()
    first, second = _branches(clock), _branches(clock)
    first.experts, second.experts = [second], [first]
    first.current()
    clock.end_step()
    second.current()
    assert not first.known
    assert len(second.known) == 1
