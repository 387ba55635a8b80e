"""How chunks go round and gradients find home, and packets for every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lightning_cp.comm.messages import swap
from lightning_cp.comm.packet import Layout, layout_of
from lightning_cp.comm.rotation import Homing, rotate
from lightning_cp.comm.rows import HomingRows, gather_rows
from lightning_cp.comm.transfer import all_gather_ints
from tests.harness import RankPool


def _chunk(owner: int) -> list[torch.Tensor]:
    """Of another size for each owner, one of them empty."""
    return [torch.full((owner, 3), owner + 0.5), torch.full((2, owner), owner, dtype=torch.float64)]


def _layout(owner: int) -> Layout:
    return layout_of(_chunk(owner))


def _rotate(rank: int, world: int) -> list[int]:
    group = dist.group.WORLD
    assert group is not None
    homing = Homing(_layout, group=group)
    owners = []
    for owner, chunk in rotate(_chunk(rank), _layout, group=group):
        owners.append(owner)
        for mine, expected in zip(chunk, _chunk(owner), strict=True):
            assert torch.equal(mine, expected), f"rank {rank} was given another chunk for {owner}'s"
        homing.add(owner, [x + 10**rank for x in chunk])
    for total, chunk in zip(homing.finish(), _chunk(rank), strict=True):
        assert torch.equal(total, world * chunk + sum(10**r for r in range(world)))
    return owners


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_rank_sees_every_chunk_and_gets_every_share_of_its_own(run_ranks: RankPool, world: int) -> None:
    expected = [[(rank - step) % world for step in range(world)] for rank in range(world)]
    assert run_ranks(world, _rotate) == expected


def _swap(rank: int, world: int) -> None:
    message: Callable[[int, int], list[torch.Tensor]] = lambda source, target: [  # noqa: E731
        torch.full((target, source), 10.0 * source + target).T,  # not contiguous
        torch.ones(target, dtype=torch.bool),
    ]
    group = dist.group.WORLD
    assert group is not None
    expected = [message(source, rank) for source in range(world)]
    landings = [[torch.empty(x.shape, dtype=x.dtype) for x in tensors] for tensors in expected]
    swap([message(rank, target) for target in range(world)], landings, group=group)
    for found, tensors in zip(landings, expected, strict=True):
        for mine, theirs in zip(found, tensors, strict=True):
            assert torch.equal(mine, theirs)
    assert all_gather_ints([rank, -rank], group=group) == [[r, -r] for r in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_messages_of_uneven_sizes_reach_their_ranks(run_ranks: RankPool, world: int) -> None:
    run_ranks(world, _swap)


def _rows(rank: int, world: int, lengths: list[int]) -> None:
    group = dist.group.WORLD
    assert group is not None
    whole = torch.arange(sum(lengths) * 2, dtype=torch.bfloat16).view(-1, 2)
    own = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    buffer = torch.full_like(whole, float("nan"))
    buffer[own] = whole[own]
    gather_rows(buffer, lengths, group=group).wait()
    assert torch.equal(buffer, whole)
    homing = HomingRows(lengths, group=group)
    lots = [torch.full((sum(lengths), 2 + lot), 10.0**rank + lot) for lot in range(3)]
    totals = [lot[own].new_empty(lengths[rank], lot.shape[1]) for lot in lots]
    for lot, total in zip(lots, totals, strict=True):
        homing.send(lot, total)
    homing.finish()
    for index, total in enumerate(totals):
        assert (total == sum(10.0**r + index for r in range(world))).all()


@pytest.mark.parametrize("lengths", [[2], [3, 0], [1, 4, 2], [0, 5, 0, 1]], ids=str)
def test_rows_of_every_rank_are_gathered_and_shares_of_them_summed_at_home(
    run_ranks: RankPool, lengths: list[int]
) -> None:
    run_ranks(len(lengths), _rows, lengths)
