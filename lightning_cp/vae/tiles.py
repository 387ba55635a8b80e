"""Compute a batch of VAE tiles: assign them to ranks and exchange the results, bitwise equal to one process."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch

from lightning_cp.comm.packet import Piece, all_gather_tensors
from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.mesh.degrees import Shares
from lightning_cp.mesh.groups import MeshGroups
from lightning_cp.vae.deferred import UnitCall

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MAX_DIMS = 5
# Fields of a result's layout: dtype, number of dims, then sizes and dim indices, both outermost in memory first.
_FIELDS = 2 + 2 * _MAX_DIMS


def owners(costs: dict[int, int], ranks: int, shares: Shares | None = None) -> dict[int, int]:
    """Assign units to ranks, most expensive unit first, each to the rank that is done with it first.

    Args: shares: relative speed of each rank; None: equal. Returns: rank of each unit, the same on every rank.
    """
    speeds = shares or (1,) * ranks
    loads, owner = [0] * ranks, {}
    for unit in sorted(costs, key=lambda unit: (-costs[unit], unit)):
        owner[unit] = min(range(ranks), key=lambda rank: Fraction(loads[rank] + costs[unit], speeds[rank]))
        loads[owner[unit]] += costs[unit]
    return owner


class _Tile(NamedTuple):
    """Layout of a result in a packet: its dims with the outermost in memory first, and their original indices.

    The receiver restores the memory format, because on CPU a convolution may round differently in channels_last.
    """

    piece: Piece
    order: list[int]


@dataclass(frozen=True)
class TileWorker:
    """Computes a batch of calls over the ranks of a context group.

    Ranks: all of the group, with equal batches. Communication: an all-gather of ints, and one packet to every peer.
    Raises: RuntimeError: another rank failed; that rank raises its own error.
    """

    groups: MeshGroups

    def __call__(self, calls: list[UnitCall]) -> None:
        costs: dict[int, int] = {}
        for call in calls:
            costs[call.unit] = costs.get(call.unit, 0) + call.tile.numel()
        owner = owners(costs, self.groups.context_size, self.groups.shares)
        by_rank = [[call for call in calls if owner[call.unit] == rank] for rank in range(self.groups.context_size)]
        local_calls, failure = by_rank[self.groups.context_rank], None
        try:
            for call in local_calls:
                call.run()
        except Exception as error:  # reported to the other ranks before it is raised: they wait for this rank
            failure = error
        layouts = self._layouts(calls, local_calls, failure)
        tiles = [call.result.value.permute(layouts[id(call)].order).contiguous() for call in local_calls]
        pieces = [[layouts[id(call)].piece for call in theirs] for theirs in by_rank]
        received = all_gather_tensors(tiles, pieces, device=calls[0].tile.device, group=self.groups.context)
        for rank, (theirs, results) in enumerate(zip(by_rank, received, strict=True)):
            if rank != self.groups.context_rank:
                for call, tile in zip(theirs, results, strict=True):
                    order = layouts[id(call)].order
                    call.result.value = tile.permute([order.index(dim) for dim in range(tile.ndim)])

    def _layouts(
        self, calls: list[UnitCall], local_calls: list[UnitCall], failure: Exception | None
    ) -> dict[int, _Tile]:
        """All-gather the layouts of all results, by id of the call; each rank provides those of its own calls."""
        assert self.groups.context is not None, "a group of one computes tiles itself"
        values = [int(failure is not None)]
        computed = {id(call) for call in local_calls} if failure is None else set()
        for call in calls:
            entry = [0] * _FIELDS
            if id(call) in computed:
                x = call.result.value
                order = sorted(range(x.ndim), key=x.stride, reverse=True)
                entry[: 2 + 2 * x.ndim] = _DTYPES.index(x.dtype), x.ndim, *[x.shape[dim] for dim in order], *order
            values += entry
        everyone = all_gather_ints(values, group=self.groups.context)
        if failure is not None:
            raise failure
        failed = [rank for rank, (has_failed, *_) in enumerate(everyone) if has_failed]
        if failed:
            raise RuntimeError(
                f"rank {failed[0]} of the context group could not compute its VAE tiles: see its error message"
            )
        total = [sum(column) for column in zip(*everyone, strict=True)][1:]
        entries = [total[i * _FIELDS : (i + 1) * _FIELDS] for i in range(len(calls))]
        return {
            id(call): _Tile(Piece(tuple(rest[:dims]), _DTYPES[dtype]), rest[dims : 2 * dims])
            for call, (dtype, dims, *rest) in zip(calls, entries, strict=True)
        }
