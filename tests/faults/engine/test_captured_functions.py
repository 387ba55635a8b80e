"""References to PyTorch's attention function from before a plan: followed in compiled code, refused in eager code."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from lightning_cp.compat import compiler
from lightning_cp.engine.attention.stand_ins import original_of
from lightning_cp.errors import InterceptionError
from tests.dist.compare import averaged, outcome, worst
from tests.faults.engine.patched_parts import PLAN, attend, model_of
from tests.harness import RankPool

_EXACT = 1e-9
_ORIGINAL = original_of(F.scaled_dot_product_attention)  # models of earlier tests may be parallel


def _by(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Attention of 4 heads by a function."""
    q = x.unflatten(-1, (4, -1)).transpose(1, 2)
    return function(q, q.flip(-1), 0.5 * q).transpose(1, 2).flatten(2)


def _default(x: Tensor, function: Any = _ORIGINAL) -> Tensor:
    return _by(function, x)


def _keyword(x: Tensor, *, function: Any = _ORIGINAL) -> Tensor:
    return _by(function, x)


def _closure(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: _by(function, x)


class _Class:
    attribute = _ORIGINAL
    static = staticmethod(_ORIGINAL)


_TABLE, _TUPLE, _PARTIAL = {"sdpa": _ORIGINAL}, (_ORIGINAL,), partial(_ORIGINAL, is_causal=False)
CAPTURED: dict[str, Callable[[Tensor], Tensor]] = {
    "default": _default,
    "keyword": _keyword,
    "closure": _closure(_ORIGINAL),
    "partial": lambda x: _by(_PARTIAL, x),
    "partial of a function": partial(_by, _ORIGINAL),
    "table": lambda x: _by(_TABLE["sdpa"], x),
    "tuple": lambda x: _by(_TUPLE[0], x),
    "attribute of a class": lambda x: _by(_Class().attribute, x),
    "static method": lambda x: _by(_Class.static, x),
    "private name": lambda x: _by(torch._C._nn.scaled_dot_product_attention, x),  # type: ignore[attr-defined]
}
_CALLS: list[Callable[[Tensor], Tensor]] = []  # set by the tests


class Block(nn.Module):
    """Attends by name, and by captured functions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + attend(self, self.linear(x))
        return x + sum((function(x) for function in _CALLS), torch.zeros_like(x))


def _x(tokens: int = 11) -> Tensor:
    return torch.randn(2, tokens, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _eager(rank: int, world: int) -> list[str]:
    """Errors of two forwards with each function."""
    model, said = model_of(Block, 1), []
    for function in CAPTURED.values():
        _CALLS[:] = [function]
        apply_context_parallel(model, ContextParallelConfig(ring_degree=world), PLAN)
        for _ in range(2):
            with pytest.raises(InterceptionError) as caught:
                model(_x())
            said.append(str(caught.value))
        remove_context_parallel(model)
    return said


def test_captured_functions_are_refused_in_eager_code(run_ranks: RankPool) -> None:
    for said in run_ranks(3, _eager):
        assert len(said) == 2 * len(CAPTURED)
        assert all("makes an attention call that could not be intercepted" in message for message in said)


def _compiled(rank: int, world: int) -> tuple[float, float, bool]:
    """Errors of output and gradients, and whether the functions are the originals after the plan was removed."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)  # asked by the compiler
    _CALLS[:] = CAPTURED.values()
    single, model = model_of(Block, 2), model_of(Block, 2)
    expected, gradients = outcome(single, {"x": _x()})
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), PLAN)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    out, found = outcome(run, {"x": _x()})
    found = {name.removeprefix("_orig_mod."): gradient for name, gradient in found.items()}
    errors = float((out - expected).abs().max()), worst(averaged(found, world), gradients)
    remove_context_parallel(model)
    return *errors, torch.equal(outcome(run, {"x": _x()})[0], expected)


@pytest.mark.full
def test_captured_functions_are_followed_in_compiled_code(run_ranks: RankPool) -> None:
    for *errors, is_back in run_ranks(3, _compiled, timeout_s=240):
        assert max(errors) < _EXACT
        assert is_back


def _compiled_before(rank: int, world: int, has_other: bool) -> float:
    """Error of a block that calls a function which was compiled, and has run, before the plan was applied.

    Args: has_other: another model was parallel before torch's compiler was imported.
    """
    if has_other:
        _CALLS[:] = [_default]
        other = model_of(Block, 1)
        with mock.patch.object(compiler, "dynamo_is_imported", return_value=False):
            apply_context_parallel(other, ContextParallelConfig(ring_degree=world), PLAN)
    function = torch.compile(_default, backend="eager", dynamic=False)
    _CALLS[:] = [function]
    model, x = model_of(Block, 1), _x(4 * world)
    with torch.no_grad():
        function(_x(4))  # as many tokens as a shard
        expected = model(x)[0]
        apply_context_parallel(model, ContextParallelConfig(ring_degree=world), PLAN)
        outputs = [model(x)[0] for _ in range(3)]
    remove_context_parallel(model)
    return max(float((out - expected).abs().max()) for out in outputs)


@pytest.mark.parametrize("has_other", [False, True])
@pytest.mark.default(1)
def test_functions_that_were_compiled_before_are_followed(run_ranks: RankPool, has_other: bool) -> None:
    assert max(run_ranks(3, _compiled_before, has_other)) < _EXACT
