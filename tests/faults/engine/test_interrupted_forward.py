"""Forwards that Ctrl-C or an error interrupts: the model is then as it was, and the next forward is exact."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_cp import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from lightning_cp.engine.apply import installed_on
from lightning_cp.engine.sharding import lengths
from tests.dist.compare import outcome
from tests.dist.plain import PLAIN_PLAN, Plain
from tests.harness import RankPool
from tests.models.wan import wan


def _interrupting(error: type[BaseException], after: int) -> Any:
    """A forward hook that raises in its n-th call."""
    calls = 0

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            raise error("interrupted")

    return hook


@pytest.mark.parametrize(
    ("error", "where", "reentrant"),
    [
        (KeyboardInterrupt, "forward", False),
        (SystemExit, "replay", True),
        (RuntimeError, "replay", False),
        (RuntimeError, "forward", True),
    ],
)
@pytest.mark.default(1)
def test_nothing_is_left_of_an_interrupted_forward(error: type[BaseException], where: str, reentrant: bool) -> None:
    model, arguments = wan().build(), wan().arguments()
    model.train().enable_gradient_checkpointing(partial(checkpoint, use_reentrant=reentrant))
    before = model._gradient_checkpointing_func
    expected, _ = outcome(model, arguments)
    apply_context_parallel(model, ContextParallelConfig())
    installed = installed_on(model)
    assert installed is not None
    handle = model.blocks[1].ffn.register_forward_hook(_interrupting(error, 1 if where == "forward" else 2))
    if where == "forward":
        with pytest.raises(error, match="interrupted"):
            model(**arguments)
    else:
        loss = model(**arguments, return_dict=False)[0].sum()
        with pytest.raises(error, match="interrupted"):
            loss.backward()
    handle.remove()
    assert installed.session.forwards == 0
    assert model._gradient_checkpointing_func is before
    out, _ = outcome(model, arguments)
    assert (out - expected).abs().max() < 1e-12
    assert installed.session.call is None
    remove_context_parallel(model)
    assert model._gradient_checkpointing_func is before
    out, _ = outcome(model, arguments)
    assert torch.equal(out, expected)


def test_a_parallel_model_is_not_pickled_but_its_weights_are() -> None:
    model = wan().build()
    apply_context_parallel(model, ContextParallelConfig())
    for part in (model, nn.Sequential(model), model.blocks[0], copy.deepcopy(model)):
        for save in (pickle.dumps, lambda part: torch.save(part, io.BytesIO())):
            with pytest.raises(pickle.PicklingError, match=r"Save its state_dict\(\)"):
                save(part)
    torch.save(model.state_dict(), io.BytesIO())
    remove_context_parallel(model)
    pickle.loads(pickle.dumps(model))


class _Ending(Plain):
    """Computes something after its last collective."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Identity()

    def forward(self, x: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        return (self.last(super().forward(x)[0]),)


def _after_failures(rank: int, world: int, where: str) -> list[float]:
    """Errors of forwards of several lengths, after each of which one failed: on rank 1 at its end, or on all midway."""
    torch.manual_seed(0)
    model = _Ending().double()
    xs = [torch.randn(2, n, 16, dtype=torch.float64) for n in (9, 10, 9, 11, 12, 9, 10)]
    expected, before = [model(x)[0].detach() for x in xs], lengths.MOST_LENGTHS
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), PLAIN_PLAN)
    errors = []
    try:
        lengths.MOST_LENGTHS = 2
        for x, right in zip(xs, expected, strict=True):
            if where == "midway" or rank == 1:
                module = model.blocks[1] if where == "midway" else model.last
                handle = module.register_forward_hook(_interrupting(RuntimeError, 1))
                with pytest.raises(RuntimeError, match="interrupted"):
                    model(x)
                handle.remove()
            else:
                model(x)
            errors.append((model(x)[0] - right).abs().max().item())
    finally:
        lengths.MOST_LENGTHS = before
    return errors


@pytest.mark.parametrize("where", ["end", "midway"])
def test_the_forward_after_one_that_failed_is_exact(run_ranks: RankPool, where: str) -> None:
    """Ranks agree which lengths they have exchanged, for plans that do not describe attention."""
    for errors in run_ranks(3, _after_failures, where, timeout_s=60):
        assert max(errors) < 1e-12
