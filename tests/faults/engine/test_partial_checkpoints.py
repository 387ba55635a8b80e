"""Activation checkpointing of a part of a block, by the block's own code: exact, or refused."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_cp import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from lightning_cp.errors import InterceptionError
from tests.dist.compare import averaged, outcome, worst
from tests.faults.engine.patched_parts import PLAN, Attending, attend, model_of
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


def _x(tokens: int = 11) -> Tensor:
    return torch.randn(2, tokens, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _run(rank: int, world: int, checkpointed: str, reentrant: bool) -> tuple[float, float]:
    class Trial(Block):
        pass

    Trial.checkpointed, Trial.reentrant = checkpointed, reentrant
    single, model = model_of(Trial, 2), model_of(Trial, 2)
    expected, gradients = outcome(single, {"x": _x()})
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), PLAN)
    out, found = outcome(model, {"x": _x()})
    remove_context_parallel(model)
    return float((out - expected).abs().max()), worst(averaged(found, world), gradients)


@pytest.mark.parametrize(
    ("checkpointed", "reentrant"), [("module", False), ("function", True), ("nested", False), ("nested", True)]
)
@pytest.mark.default(2)
def test_a_checkpointed_part_that_attends_is_exact(run_ranks: RankPool, checkpointed: str, reentrant: bool) -> None:
    for errors in run_ranks(3, _run, checkpointed, reentrant):
        assert max(errors) < _EXACT


class Recomputes(torch.autograd.Function):
    """Checkpointing as in some models' own code: backward calls the function again."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.function, ctx.x, ctx.parameters = function, x, parameters
        out: Tensor = function(x)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.function(x), (x, *ctx.parameters), gradients)


class Inherits(Recomputes):
    """Has the forward of its parent."""


class Decorated(Recomputes):
    """Has a forward inside of wrappers."""

    @staticmethod
    @torch.no_grad()
    @partial(torch.amp.custom_fwd, device_type="cpu")
    def forward(ctx: Any, function: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.function, ctx.x, ctx.parameters = function, x, parameters
        out: Tensor = function(x)
        return out


class Separate(Recomputes):
    """Has a forward without a context."""

    @staticmethod
    def forward(function: Any, x: Tensor, *parameters: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = function(x)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.function, ctx.x, *ctx.parameters = inputs


class Own(nn.Module):
    """Checkpoints a function by an autograd function of its own."""

    drops, recomputes = False, Recomputes

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = attend(self, x) + self.recomputes.apply(self._function, x, *self.parameters())  # type: ignore[no-untyped-call]
        return out

    def _function(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return F.dropout(y, 0.5, self.training) if self.drops else attend(self, y)


def _own(rank: int, world: int, drops: bool, recomputes: type[Recomputes]) -> str:
    model = model_of(type("Trial", (Own,), {"drops": drops, "recomputes": recomputes}), 1)
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), PLAN)
    with pytest.raises(InterceptionError) as caught:
        model(_x().requires_grad_())
    with torch.no_grad():
        model(_x())  # there is no backward
    remove_context_parallel(model)
    model(_x().requires_grad_())[0].sum().backward()
    return str(caught.value)


@pytest.mark.parametrize(
    ("drops", "recomputes"), [(True, Recomputes), *((False, x) for x in (Recomputes, Inherits, Decorated, Separate))]
)
def test_autograd_functions_that_recompute_attention_or_dropout_are_refused(
    run_ranks: RankPool, drops: bool, recomputes: type[Recomputes]
) -> None:
    for said in run_ranks(2, _own, drops, recomputes):
        assert re.search(r"is computed inside of \w+, a torch.autograd.Function that", said)


def _masks(rank: int, world: int, reentrant: bool) -> tuple[Tensor, Tensor]:
    """Dropout masks of a checkpointed function: in forward and in backward."""
    masks: list[Tensor] = []

    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = attend(self, x) + checkpoint(self._function, x, use_reentrant=reentrant)
            return out

        def _function(self, x: Tensor) -> Tensor:
            x = F.dropout(x, 0.5, self.training)
            masks.append(x.detach() != 0)
            return x * x

    model = model_of(Drops, 1)
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), PLAN)
    torch.manual_seed(0)
    model(_x(4 * world).requires_grad_())[0].sum().backward()
    remove_context_parallel(model)
    forward, backward = masks
    return forward, backward


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_function_drops_the_same_elements_again(run_ranks: RankPool, reentrant: bool) -> None:
    found = run_ranks(3, _masks, reentrant)
    assert all(torch.equal(forward, backward) for forward, backward in found)
    assert not torch.equal(found[0][0], found[1][0])  # ranks drop different elements
