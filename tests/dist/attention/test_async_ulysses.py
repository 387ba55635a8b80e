"""Asynchronous Ulysses is exact, forward and backward, and starts its transfers before the next projection."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_cp import ContextParallelConfig, context_parallel_attention
from lightning_cp.attention import start_ulysses
from lightning_cp.comm import messages
from lightning_cp.errors import PeerMismatchError, ShapeError
from tests.dist import problems
from tests.dist.problems import Problem, check_exact
from tests.harness import RankPool
from tests.harness.cases import full_unless

EARLY = ("q", "qk", "qkv", "v")


def _in_transit(early: str) -> Any:
    """`context_parallel_attention`, with some of its arguments sent before."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **settings: Any) -> Any:
        config, known = settings["parallel_config"], (settings.get("q_lengths"), settings.get("kv_lengths"))
        sent = [
            start_ulysses(x, parallel_config=config, lengths=lengths) if name in early else x
            for name, x, lengths in zip("qkv", (q, k, v), (known[0], known[1], known[1]), strict=True)
        ]
        return context_parallel_attention(*sent, *rest, **settings)

    return attend


def _check(rank: int, world: int, found: list[Problem], early: str) -> list[str]:
    with mock.patch.object(problems, "context_parallel_attention", _in_transit(early)):
        return check_exact(rank, world, found)


@pytest.mark.parametrize(
    ("world", "ring", "ulysses", "early"),
    full_unless(
        lambda world, ring, ulysses, early: early in ("q", "qkv") if ulysses == 3 else world == 3 and early == "qkv",
        [(*degrees, early) for degrees in ((2, 1, 2), (3, 1, 3), (4, 2, 2), (3, 3, 1)) for early in EARLY],
    ),
)
def test_attention_is_exact(run_ranks: RankPool, world: int, ring: int, ulysses: int, early: str) -> None:
    lengths = tuple(1 + (i * 3 + 2) % 5 for i in range(world))
    heads = 4 * ulysses
    base = Problem(ring, ulysses, lengths, lengths, heads=heads, kv_heads=heads)
    found = [replace(base, mask=mask, causal=causal) for mask, causal in product(problems.MASKS, (False, True))]
    found += [
        replace(base, kv_heads=ulysses, known=False),
        replace(base, kv_lengths=lengths[::-1], mask="rows", through="lse"),
        replace(base, needs="q", rotate="alltoall"),
        replace(base, needs="v", layout="transposed"),
        replace(base, q_lengths=(0, *lengths[1:]), kv_lengths=(0, *lengths[1:]), known=False),
    ]
    for wrong in run_ranks(world, _check, found, early):
        assert not wrong


def _checkpointed(rank: int, world: int) -> float:
    """Largest difference of gradients, with and without a recomputation in backward."""
    config = ContextParallelConfig(ulysses_degree=world)
    torch.manual_seed(rank)
    x = torch.randn(1, 5, 6, 4, dtype=torch.float64)
    projections = [torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)]

    def block(x: Tensor) -> Tensor:
        q, k = (start_ulysses(project(x), parallel_config=config) for project in projections[:2])
        return context_parallel_attention(q, k, projections[2](x), parallel_config=config)

    grads = []
    for call in (block, lambda x: checkpoint(block, x, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        call(leaf).square().sum().backward()
        assert leaf.grad is not None
        grads.append(leaf.grad)
    return float((grads[0] - grads[1]).abs().max())


def test_a_recomputed_block_sends_again(run_ranks: RankPool) -> None:
    assert max(run_ranks(3, _checkpointed)) == 0


def _order(rank: int, world: int) -> list[str]:
    """The order of events in forward and in backward."""
    config, seen = ContextParallelConfig(ulysses_degree=world), []
    start = messages.start_all_to_all

    def recorded(*arguments: Any, **settings: Any) -> Any:
        seen.append("start")
        finish = start(*arguments, **settings)

        def finished() -> None:
            seen.append("finish")
            finish()

        return finished

    class Projection(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen.append("project")
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            seen.append("projection's gradient")
            return grad * 2

    x = torch.randn(1, 4, world, 4, requires_grad=True)
    with mock.patch("lightning_cp.attention.ulysses.start_all_to_all", recorded):
        q = start_ulysses(Projection.apply(x), parallel_config=config, lengths=[4] * world)
        k = start_ulysses(Projection.apply(x), parallel_config=config, lengths=[4] * world)
        out = context_parallel_attention(q, k, Projection.apply(x), parallel_config=config)
        seen.append("backward")
        out.sum().backward()
    return seen


def test_transfers_overlap_with_projections(run_ranks: RankPool) -> None:
    sent, gradient = ["start", "finish"], ["finish", "projection's gradient"]
    forward = ["project", "start", "project", "start", "project", "start", "finish", "finish", "finish", *sent]
    for seen in run_ranks(2, _order):
        assert seen == [*forward, "backward", *sent, "start", "start", "start", *gradient * 3]


def _refusals(rank: int, world: int) -> list[str]:
    config = ContextParallelConfig(ulysses_degree=world)
    x = torch.randn(1, 4, 2 * world, 4)
    cases: list[Any] = [
        lambda: start_ulysses(x[:, :, 1:], parallel_config=config),
        lambda: start_ulysses(x[0], parallel_config=config),
        lambda: start_ulysses(x[:, :, : world * (1 + rank // 2)], parallel_config=config),
        lambda: start_ulysses(x if rank else x[0], parallel_config=config),
        lambda: start_ulysses(x, parallel_config=config, lengths=[4]),
        lambda: torch.func.jvp(lambda x: start_ulysses(x, parallel_config=config), (x,), (x,)),
    ]
    said = []
    for case in cases:
        with pytest.raises((ShapeError, PeerMismatchError, NotImplementedError)) as raised:
            case()
        said.append(str(raised.value))
    sent = start_ulysses(x, parallel_config=config)
    context_parallel_attention(sent, x, x, parallel_config=config)
    with pytest.raises(RuntimeError, match="already finished"):
        context_parallel_attention(sent, x, x, parallel_config=config)
    return said


def test_tensors_that_cannot_be_sent_are_refused_on_every_rank(run_ranks: RankPool) -> None:
    for rank, said in enumerate(run_ranks(3, _refusals)):
        assert "ulysses_degree=3 must divide the number of heads, got 5" in said[0]
        assert "must be [batch, seq_local, heads, head_dim]" in said[1]
        assert "different shapes" in said[2]
        assert ("different shapes" if rank else "must be [batch") in said[3]
        assert "lengths=[4] must hold one length for each of the 3 ranks" in said[4]
        assert "start_ulysses has no forward derivative" in said[5]
