"""Transfers are under way while attention is computed: read from the traces of real ones."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_cp import ContextParallelConfig, context_parallel_attention
from lightning_cp.attention import gathered
from lightning_cp.recipes.benchmarks.trace import read_trace, record_trace, spans_of
from tests.harness import RankPool

TOKENS, HEADS, HEAD_DIM = 768, 6, 16
KERNELS = "aten::_scaled_dot_product_flash_attention_for_cpu"  # forward, and with "_backward"


def _hidden(rank: int, world: int, method: str) -> list[list[int]]:
    """Kernels that ran while each exchange was under way: of forward, of backward."""
    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, TOKENS // world, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
    config = ContextParallelConfig(ring_degree=world, rotate_method=method)
    lengths = [TOKENS // world] * world
    slices = 2 * 2 * TOKENS * HEAD_DIM * 4  # of K and V of two heads: three slices
    out: list[Tensor] = []
    with mock.patch.dict(gathered.SLICE_BYTES, cpu=slices):
        forward = record_trace(
            lambda: out.append(
                context_parallel_attention(q, k, v, parallel_config=config, q_lengths=lengths, kv_lengths=lengths)
            )
        )
        backward = record_trace(lambda: out.pop().sum().backward())
    return [_kernels_within(forward), _kernels_within(backward)]


def _kernels_within(events: list[dict[str, Any]]) -> list[int]:
    kernels = spans_of(events, KERNELS)
    return [sum(x.begin <= one.begin and one.end <= x.end for one in kernels) for x in read_trace(events).transfers]


def test_no_transfer_of_a_rotation_is_waited_for_with_nothing_computed(run_ranks: RankPool) -> None:
    """Each chunk is received while the previous one is computed; in backward also all sums of gradients."""
    for forward, backward in run_ranks(3, _hidden, "alltoall"):
        assert forward == [1, 1]
        assert len(backward) == 4
        assert min(backward) >= 1


def test_slices_of_heads_are_gathered_while_others_are_computed(run_ranks: RankPool) -> None:
    """The first slice is gathered while the local keys are computed; only the last gradients overlap with nothing."""
    for forward, backward in run_ranks(3, _hidden, "allgather"):
        assert len(forward) == 3
        assert min(forward) >= 1
        assert len(backward) == 6
        assert sorted(backward)[0] == 0
        assert sorted(backward)[1] >= 1
