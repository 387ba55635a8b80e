"""`torch.compile` of a whole parallel model: one graph, exact, checked, in any order with apply and remove."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from lightning_cp.engine.apply import installed_on
from lightning_cp.errors import PeerMismatchError
from tests.dist.attention.test_counting import counted
from tests.dist.compare import averaged, nothing_narrowed, outcome, worst
from tests.dist.plain import PLAIN_PLAN, Plain
from tests.faults.engine.test_exchanged_parts import change_model, config_of, donor_of
from tests.harness import RankPool
from tests.models import TINY
from tests.models.wan import wan

# The compiler does not see the tests' lifted casts to float32 everywhere.
_OUTPUT, _GRADIENT = 1e-6, 1e-5
Errors = tuple[float, float]


def _compiled(model: Any) -> Any:
    return torch.compile(model, fullgraph=True, backend="eager")


def _outcome(model: nn.Module, arguments: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output, and the gradients by the names of the model that is not compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the compiler's, of diffusers' code
        out, found = outcome(model, arguments)
    return out, {name.removeprefix("_orig_mod."): x for name, x in found.items()}


def _errors(model: nn.Module, arguments: dict[str, Any], expected: tuple[Tensor, Any], world: int) -> Errors:
    out, found = _outcome(model, arguments)
    return float((out - expected[0]).abs().max()), worst(averaged(found, world), expected[1])


def _whole(rank: int, world: int, name: str, mode: str, backend: str, replay: bool) -> list[Errors]:
    """Errors in three forwards: peers are compared in the first two of a parallel model."""
    if name == "plain":
        torch.manual_seed(0)
        model: Any = Plain().double()
        arguments = {"x": torch.randn(2, 10, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}
    else:
        model, arguments = TINY[name].build(), TINY[name].arguments()
    if replay:
        model.train().enable_gradient_checkpointing()
    # Inductor's kernels round differently, in one process too.
    alone = torch.compile(model, backend=backend) if backend == "inductor" else model
    expected = _outcome(alone, arguments)
    apply_context_parallel(model, config_of(mode, world), PLAIN_PLAN if name == "plain" else None)
    compiled = torch.compile(model, fullgraph=not replay, backend=backend)  # see docs/plans.md
    return [_errors(compiled, arguments, expected, world) for _ in range(3)]


@pytest.mark.parametrize(
    ("name", "mode", "backend", "replay"),
    [
        ("plain", "ring", "eager", False),
        ("wan", "ring", "aot_eager", True),
        ("flux", "ring", "inductor", True),
        ("ltx", "ring", "eager", False),  # of a class that diffusers allows in graphs as it is
    ],
)
@pytest.mark.default("plain", "ltx")
def test_a_parallel_model_compiled_as_a_whole_is_exact(
    run_ranks: RankPool, name: str, mode: str, backend: str, replay: bool
) -> None:
    for results in run_ranks(3, _whole, name, mode, backend, replay, timeout_s=300):
        for output, gradient in results:
            assert output < _OUTPUT
            assert gradient < _GRADIENT


def _peers(rank: int, world: int) -> list[str]:
    """Errors of six compiled forwards, in the first or the fourth of which the last rank gets another step."""
    messages = []
    for wrong in (0, 3):
        model, arguments = wan().build(), wan().arguments()
        apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
        installed = installed_on(model)
        assert installed is not None
        compiled = _compiled(model)
        with torch.no_grad(), nothing_narrowed(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for forward in range(6):
                steps = arguments["timestep"] + (forward == wrong and rank == world - 1)
                try:
                    compiled(**{**arguments, "timestep": steps})
                except PeerMismatchError as error:
                    messages.append(f"{wrong} {forward} {error}")
        assert int(installed.session.num_graph_checks) == 6
    return messages


def test_compiled_forwards_compare_peers(run_ranks: RankPool) -> None:
    for first, later in run_ranks(3, _peers, timeout_s=300):
        assert first.startswith("0 0 ")
        assert later.startswith("3 4 ")
        assert "timestep" in first
        assert "timestep" in later


class _Scaled(Plain):
    """Has arguments that are no tensors."""

    def forward(self, x: Tensor, scale: float = 1.0, count: int = 1, mode: str = "a", nested: Any = None) -> Any:
        x = x * scale * count if mode == "a" else x
        return super().forward(x if nested is None else x * nested["factors"][0])


_NUMBERS: dict[str, dict[str, Any]] = {
    "scale": {"scale": 9.5},
    "count": {"count": 7},
    "mode": {"mode": "a:b,c'"},
    "nested": {"nested": {"factors": [2, 1]}},
}


def _numbers(rank: int, world: int, backend: str) -> list[str]:
    """Errors of compiled forwards with variable numbers, in every third of which one rank is given another value."""
    model, said = _Scaled(), []
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world), PLAIN_PLAN)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x = torch.randn(1, 10, 16, generator=torch.Generator().manual_seed(0))
    changes = [change for one in _NUMBERS.values() for change in ({}, {}, one)]
    for forward, change in enumerate([*changes, {}]):
        given = {"scale": 1.0 + forward, "count": 8 + forward, "mode": "a", "nested": {"factors": [1, 1]}}
        with torch.no_grad():
            try:
                compiled(x, **(given | change if rank == world - 1 else given))
            except PeerMismatchError as error:
                said.append(str(error))
    return said


@pytest.mark.full
def test_compiled_forwards_compare_numbers_and_strings(run_ranks: RankPool) -> None:
    for said in run_ranks(3, _numbers, "inductor", timeout_s=300):
        assert len(said) == len(_NUMBERS)
        for name, message in zip(_NUMBERS, said, strict=True):
            assert f"of {name} differ in forward " in message


def _order(rank: int, world: int) -> list[tuple[bool, float, float]]:
    """Compiled and run, applied, removed, applied, with another processor: if it sends anything, and errors."""
    found = []
    model, arguments = wan().build(), wan().arguments()
    expected = outcome(model, arguments)
    compiled = _compiled(model)
    for parallel in (False, True, False, True, None):
        if parallel is None:
            change_model(model, "first processor", donor_of("wan"))
        elif parallel:
            apply_context_parallel(compiled, ContextParallelConfig(ring_degree=world))
        elif installed_on(model) is not None:
            remove_context_parallel(compiled)
        with counted() as traffic:
            errors = _errors(compiled, arguments, expected, world)
        found.append((traffic.ring_bytes > 0, *errors))
    return found


@pytest.mark.full
def test_apply_remove_and_changes_on_a_compiled_model_take_effect(run_ranks: RankPool) -> None:
    for found in run_ranks(2, _order, timeout_s=240):
        assert [sends for sends, *_ in found] == [False, True, False, True, True]
        assert max(output for _, output, _ in found) < _OUTPUT
        assert max(gradient for *_, gradient in found) < _GRADIENT


class _Idle:
    """A processor without attention."""

    def __call__(self, attn: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


def _unfit(rank: int, world: int) -> str:
    model, arguments = wan().build(), wan().arguments()
    apply_context_parallel(model, ContextParallelConfig(ring_degree=world))
    compiled = _compiled(model)
    model.blocks[0].attn1.processor = _Idle()
    with torch.no_grad(), pytest.raises(Exception, match="changed after apply_context_parallel") as caught:
        compiled(**arguments)
    return str(caught.value)


def test_a_change_that_does_not_fit_is_refused_under_fullgraph(run_ranks: RankPool) -> None:
    for message in run_ranks(2, _unfit, timeout_s=120):
        assert "force_eager" in message
