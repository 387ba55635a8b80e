"""Chunks and gradients around the ring, and packets for every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lightning_cp.attention.ulysses import all_to_all
from lightning_cp.comm.packet import Layout, layout_of
from lightning_cp.comm.ring_exchange import RingGradReducer, rotate
from lightning_cp.comm.transfer import all_gather_ints, exchange_flat, gather_flat
from tests.harness import RankPool


def _chunk(owner: int) -> list[torch.Tensor]:
    """Chunks of another size for each owner, one of them empty."""
    return [torch.full((owner, 3), owner + 0.5), torch.full((2, owner), owner, dtype=torch.float64)]


def _layout(owner: int) -> Layout:
    return layout_of(_chunk(owner))


def _rotate(rank: int, world: int) -> tuple[list[int], list[bool]]:
    """Owners of the chunks in order, and whether the chunks and the sums of shares are the right ones."""
    group = dist.group.WORLD
    assert group is not None
    homing = RingGradReducer(_layout, group=group)
    owners, right = [], []
    for owner, chunk in rotate(_chunk(rank), _layout, group=group):
        owners.append(owner)
        right += [torch.equal(mine, expected) for mine, expected in zip(chunk, _chunk(owner), strict=True)]
        if owner != rank:
            homing.add(owner, [x + 10**rank for x in chunk])
    totals = [x + 10**rank for x in _chunk(rank)]
    homing.finish(totals)
    for total, chunk in zip(totals, _chunk(rank), strict=True):
        right.append(torch.equal(total, world * chunk + sum(10**r for r in range(world))))
    return owners, right


def test_every_rank_sees_every_chunk_and_gets_every_share_of_its_own(run_ranks: RankPool) -> None:
    found = run_ranks(3, _rotate)
    assert [owners for owners, _ in found] == [[0, 2, 1], [1, 0, 2], [2, 1, 0]]
    assert [right for _, right in found] == [[True] * (3 * 2 + 2)] * 3


def _swap(rank: int, world: int) -> tuple[list[bool], list[list[int]]]:
    message: Callable[[int, int], list[torch.Tensor]] = lambda source, target: [  # noqa: E731
        torch.full((target, source), 10.0 * source + target).T,  # not contiguous
        torch.ones(target, dtype=torch.bool),
    ]
    group = dist.group.WORLD
    assert group is not None
    expected = [message(source, rank) for source in range(world)]
    recv_buffers = [[torch.empty(x.shape, dtype=x.dtype) for x in tensors] for tensors in expected]
    all_to_all([message(rank, target) for target in range(world)], recv_buffers, group=group)
    pairs = zip(recv_buffers, expected, strict=True)
    right = [torch.equal(mine, theirs) for found, tensors in pairs for mine, theirs in zip(found, tensors, strict=True)]
    return right, all_gather_ints([rank, -rank], group=group)


@pytest.mark.parametrize("world", [1, 3])
def test_messages_of_uneven_sizes_reach_their_ranks(run_ranks: RankPool, world: int) -> None:
    for right, integers in run_ranks(world, _swap):
        assert right == [True] * (2 * world)
        assert integers == [[r, -r] for r in range(world)]


def _flat(rank: int, world: int, sizes: list[int]) -> list[bool]:
    """Each rank sends `sizes[rank]` bytes to each rank, then to all. Returns: whether the right bytes arrive."""
    group = dist.group.WORLD
    assert group is not None
    sent = torch.cat([torch.full((sizes[rank],), 10 * rank + to, dtype=torch.uint8) for to in range(world)])
    received, gathered = (torch.full((sum(sizes),), 99, dtype=torch.uint8) for _ in range(2))
    expected = torch.cat([torch.full((n,), 10 * source + rank, dtype=torch.uint8) for source, n in enumerate(sizes)])
    equal = sizes.count(sizes[0]) == world
    pending = exchange_flat(sent, received, None if equal else ([sizes[rank]] * world, sizes), group=group)
    pending.wait()
    pending.wait()
    gather_flat(sent[: sizes[rank]], gathered, sizes, group=group).wait()
    return [torch.equal(received, expected), torch.equal(gathered, expected - rank)]


@pytest.mark.parametrize("sizes", [[2], [3, 3, 3], [1, 0, 2]], ids=str)
def test_every_rank_gets_its_bytes_from_each(run_ranks: RankPool, sizes: list[int]) -> None:
    assert run_ranks(len(sizes), _flat, sizes) == [[True, True]] * len(sizes)
