"""Bytes that attention allocates, counted at the allocator, by the number of ranks that share one sequence."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from lightning_cp import ContextParallelConfig, context_parallel_attention
from lightning_cp.benchmark.peers import diffusers_attention
from lightning_cp.benchmark.trace import Trace, read_trace, record
from tests.harness import RankPool

TOKENS, HEADS, HEAD_DIM = 4096, 8, 32
UNIT = TOKENS * HEADS * HEAD_DIM * 4  # bytes of q, of k, of v, of the result, of the whole sequence
DEGREES = [2, pytest.param(4, marks=pytest.mark.full), pytest.param(8, marks=pytest.mark.full)]


def _traces(rank: int, world: int, mode: str) -> tuple[Trace, Trace]:
    """Of forward and of backward."""
    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, TOKENS // world, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
    grad = torch.randn(1, TOKENS // world, HEADS, HEAD_DIM)
    if mode == "diffusers":
        theirs = diffusers_attention(torch.device("cpu"), ring=world, ulysses=1)
        attend = lambda: theirs(q, k, v)  # noqa: E731
    else:
        degrees = {"ulysses_degree": world} if mode == "ulysses" else {"ring_degree": world, "rotate_method": mode}
        config = ContextParallelConfig(**degrees)  # type: ignore[arg-type]
        attend = lambda: context_parallel_attention(q, k, v, parallel_config=config)  # noqa: E731
    out: list[Tensor] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of functions that diffusers calls
        torch.autograd.backward(attend(), grad)
        forward = read_trace(record(lambda: out.append(attend())))
        backward = read_trace(record(lambda: torch.autograd.backward(out.pop(), grad)))
    return forward, backward


@pytest.mark.parametrize("mode", ["allgather", "alltoall", "ulysses"])
@pytest.mark.parametrize("world", DEGREES)
def test_what_is_held_for_backward_falls_with_the_number_of_ranks(run_ranks: RankPool, world: int, mode: str) -> None:
    """Beside its inputs a ring holds its result; Ulysses what it exchanged, instead of the inputs."""
    held = (5 if mode == "ulysses" else 1) * UNIT / world
    for forward, _ in run_ranks(world, _traces, mode):
        assert held < forward.held_bytes < 1.05 * held


@pytest.mark.parametrize("world", DEGREES)
def test_a_rotation_peaks_at_two_remote_chunks(run_ranks: RankPool, world: int) -> None:
    """And at what is computed: a result and the one it is merged with; in backward the gradients of two chunks."""
    chunk, local = 2 * UNIT / world, UNIT / world
    for forward, backward in run_ranks(world, _traces, "alltoall"):
        assert forward.peak_bytes < 1.1 * (2 * chunk + 2 * local)
        # dq twice, dK and dV from the kernel, packed, arriving, and ours at home
        assert backward.peak_bytes < 1.1 * (2 * chunk + 4 * chunk + 2 * local)


@pytest.mark.parametrize("world", DEGREES)
def test_a_rotation_allocates_less_than_diffusers_ring(run_ranks: RankPool, world: int) -> None:
    ours, theirs = run_ranks(world, _traces, "alltoall"), run_ranks(world, _traces, "diffusers")
    for (forward, backward), (their_forward, their_backward) in zip(ours, theirs, strict=True):
        assert forward.peak_bytes < their_forward.peak_bytes
        assert backward.peak_bytes < their_backward.peak_bytes
