"""Sums over all ranks, and halo exchange: values, adjoints, and operator checks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_cp import ContextParallelConfig
from lightning_cp.comm.halo import halo_exchange, halo_operator, halo_ranges, sum_operator, sum_over_ranks
from lightning_cp.mesh.groups import groups_for
from tests.harness import RankPool
from tests.reference import max_error

_UNEVEN = [(7, 3), (1, 2), (4, 1), (2, 5), (9, 0)]  # tokens, reach; with empty shards, and reach beyond a neighbour


def _sizes(tokens: int, world: int) -> list[int]:
    return [tokens // world + (rank < tokens % world) for rank in range(world)]


def _whole(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _halos(rank: int, world: int) -> list[tuple[bool, float]]:
    """Whether each rank has its tokens and its neighbours', and errors of gradients."""
    found = []
    groups = groups_for(ContextParallelConfig(ring_degree=world)).name
    for tokens, reach in _UNEVEN:
        sizes = _sizes(tokens, world)
        first, last = halo_ranges(sizes, reach)[rank]
        start = sum(sizes[:rank])
        whole = _whole(2, tokens, 3)
        shard = whole[:, start : start + sizes[rank]].clone().requires_grad_()
        out = halo_exchange(shard, 1, sizes, reach, groups)
        is_right = torch.equal(out, whole[:, first:last])
        # The adjoint: gradients of a token from all ranks are added on its owner.
        weights = [_whole(2, b - a, 3) * (r + 1) for r, (a, b) in enumerate(halo_ranges(sizes, reach))]
        (out * weights[rank]).sum().backward()
        expected = torch.zeros_like(whole)
        for (a, b), weight in zip(halo_ranges(sizes, reach), weights, strict=True):
            expected[:, a:b] += weight
        assert shard.grad is not None
        found.append((is_right, max_error(shard.grad, expected[:, start : start + sizes[rank]])))
        torch.library.opcheck(halo_operator, (shard, 1, sizes, reach, groups), test_utils="test_schema")
    return found


def _sums(rank: int, world: int) -> tuple[Tensor, Tensor]:
    groups = groups_for(ContextParallelConfig(ulysses_degree=world)).name
    own = (_whole(2, 3, 5) * (rank + 1)).float().requires_grad_()
    out = sum_over_ranks(own, groups)
    (out * (rank + 1)).sum().backward()
    torch.library.opcheck(sum_operator, (own, groups), test_utils="test_schema")
    assert own.grad is not None
    return out.detach(), own.grad


@pytest.mark.parametrize("world", [3, 1])
def test_a_halo_holds_the_neighbours_tokens_and_sends_their_gradients_back(run_ranks: RankPool, world: int) -> None:
    for found in run_ranks(world, _halos):
        assert len(found) == len(_UNEVEN)
        assert all(is_right for is_right, _ in found)
        assert max(error for _, error in found) < 1e-12


@pytest.mark.parametrize("world", [3, 1])
def test_a_sum_over_ranks_is_the_same_everywhere_and_its_own_adjoint(run_ranks: RankPool, world: int) -> None:
    factor, found = world * (world + 1) / 2, run_ranks(world, _sums)
    for out, gradient in found:
        torch.testing.assert_close(out.double(), _whole(2, 3, 5) * factor, rtol=1e-6, atol=1e-6)
        assert torch.equal(out, found[0][0]), "not the same bits everywhere"
        torch.testing.assert_close(gradient, torch.full_like(gradient, factor))
