"""Activation checkpointing of a part of a block, by the block's own code: exact, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from lightning_cp import ContextParallelConfig, apply_context_parallel
from lightning_cp.errors import InterceptionError
from tests.dist.compare import averaged, outcome, worst
from tests.faults.patched_parts import PLAN, Attending, attend, model_of
from tests.harness import RankPool

_EXACT = 1e-9


class Block(nn.Module):
    """Attends in a module, in a function and without gradients."""

    checkpointed = "module"
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(16, 16), Attending()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            x = x + attend(self, y)
        inner: Any = {"module": self.inner, "function": self._function, "nested": self._nested}[self.checkpointed]
        out: Tensor = x + checkpoint(inner, y, use_reentrant=self.reentrant)
        return out

    def _function(self, x: Tensor) -> Tensor:
        return attend(self, x)

    def _nested(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


def _run(rank: int, world: int, checkpointed: str, reentrant: bool) -> tuple[float, float] | str:
    class Trial(Block):
        pass

    Trial.checkpointed, Trial.reentrant = checkpointed, reentrant
    single, model = model_of(Trial, 2), model_of(Trial, 2)
    x = torch.randn(2, 11, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected, gradients = outcome(single, {"x": x})
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), PLAN)
    try:
        out, found = outcome(model, {"x": x})
    except (InterceptionError, CheckpointError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return float((out - expected).abs().max()), worst(averaged(found, world), gradients)


@pytest.mark.parametrize("checkpointed", ["module", "nested"])
def test_a_checkpointed_module_that_attends_is_exact(run_ranks: RankPool, checkpointed: str) -> None:
    for errors in run_ranks(3, _run, checkpointed, False):
        assert isinstance(errors, tuple), errors
        assert max(errors) < _EXACT


@pytest.mark.parametrize(
    ("checkpointed", "reentrant", "message"),
    [
        ("function", True, "InterceptionError: a function that attends is checkpointed with use_reentrant=True"),
        ("function", False, "CheckpointError: torch.utils.checkpoint: A different number of tensors was saved"),
        ("module", True, "RuntimeError: a context-parallel block ran outside of its model's forward"),
        ("nested", True, "RuntimeError: a context-parallel block ran outside of its model's forward"),
    ],
)
def test_checkpoints_without_the_state_of_the_forward_are_refused(
    run_ranks: RankPool, checkpointed: str, reentrant: bool, message: str
) -> None:
    for error in run_ranks(2, _run, checkpointed, reentrant):
        assert isinstance(error, str), error
        assert error.startswith(message)
