"""How chunks go round and gradients find home, and packets for every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lightning_cp.comm.messages import swap
from lightning_cp.comm.packet import Layout, layout_of
from lightning_cp.comm.rotation import DirectHoming, NeighbourHoming, rotate_direct, rotate_neighbour
from lightning_cp.comm.transfer import all_gather_ints
from tests.harness import RankPool

WAYS = {"allgather": (rotate_direct, DirectHoming), "alltoall": (rotate_neighbour, NeighbourHoming)}


def _chunk(owner: int) -> list[torch.Tensor]:
    """Of another size for each owner, one of them empty."""
    return [torch.full((owner, 3), owner + 0.5), torch.full((2, owner), owner, dtype=torch.float64)]


def _layout(owner: int) -> Layout:
    return layout_of(_chunk(owner))


def _rotate(rank: int, world: int, way: str) -> list[int]:
    rotate, homing_type = WAYS[way]
    group = dist.group.WORLD
    assert group is not None
    homing = homing_type(_layout, group=group)  # type: ignore[operator]
    owners = []
    for owner, chunk in rotate(_chunk(rank), _layout, group=group):  # type: ignore[operator]
        owners.append(owner)
        for mine, expected in zip(chunk, _chunk(owner), strict=True):
            assert torch.equal(mine, expected), f"rank {rank} was given another chunk for {owner}'s"
        homing.add(owner, [x + 10**rank for x in chunk])
    for total, chunk in zip(homing.finish(), _chunk(rank), strict=True):
        assert torch.equal(total, world * chunk + sum(10**r for r in range(world)))
    return owners


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_rank_sees_every_chunk_and_gets_every_share_of_its_own(run_ranks: RankPool, world: int, way: str) -> None:
    expected = [[(rank - step) % world for step in range(world)] for rank in range(world)]
    assert run_ranks(world, _rotate, way) == expected


def _swap(rank: int, world: int) -> None:
    message: Callable[[int, int], list[torch.Tensor]] = lambda source, target: [  # noqa: E731
        torch.full((source, target), 10.0 * source + target),
        torch.ones(target, dtype=torch.bool),
    ]
    group = dist.group.WORLD
    assert group is not None
    received = swap(
        [message(rank, target) for target in range(world)],
        [layout_of(message(source, rank)) for source in range(world)],
        group=group,
    )
    for source, tensors in enumerate(received):
        for mine, expected in zip(tensors, message(source, rank), strict=True):
            assert torch.equal(mine, expected)
    assert all_gather_ints([rank, -rank], group=group) == [[r, -r] for r in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_messages_of_uneven_sizes_reach_their_ranks(run_ranks: RankPool, world: int) -> None:
    run_ranks(world, _swap)
