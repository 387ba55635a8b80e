"""Rows of every rank in one buffer, and shares of them on their way home: all-gather and reduce-scatter of rows that
may be uneven, under way while the caller computes.

Rows are those of dim 0, and their order is that of ranks, so that each rank's are one piece of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.packet import as_bytes
from lightning_cp.comm.transfer import Pending, exchange


@dataclass(frozen=True)
class Gathering:
    """Other ranks' rows under way."""

    pending: Pending

    def wait(self) -> None:
        """Until they are there; as often as one likes."""
        self.pending.wait()


def gather_rows(buffer: Tensor, lengths: Sequence[int], *, group: dist.ProcessGroup) -> Gathering:
    """Start to fetch the other ranks' rows. They may be read after `wait`; own rows must not change before it.

    Args:
        buffer: [sum(lengths), ...], contiguous, with this rank's rows filled in.
        lengths: rows of each rank.
    Ranks: all of `group`. Each sends its own rows n - 1 times.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rows = _rows_of_ranks(buffer, lengths)
    peers = [((rank + step) % size, (rank - step) % size) for step in range(1, size)]
    sends, receives = [(target, rows[rank]) for target, _ in peers], [(source, rows[source]) for _, source in peers]
    return Gathering(exchange(sends, receives, group=group))


class HomingRows:
    """Sums each rank's shares of rows at their owner, one lot under way at a time.

    Args:
        lengths: rows of each rank.
    Ranks: all of `group`. Each sends the others' rows, and receives its own n - 1 times, for every lot.
    """

    def __init__(self, lengths: Sequence[int], *, group: dist.ProcessGroup) -> None:
        self._lengths, self._group = lengths, group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._room: Tensor | None = None
        self._under_way: tuple[Pending, Tensor, Tensor] | None = None  # transfer, what arrives, where it belongs

    def send(self, shares: Tensor, total: Tensor) -> None:
        """Start to sum a lot.

        Args:
            shares: [sum(lengths), ...], contiguous; must not change before `finish` or the next `send`.
            total: [lengths[rank], ...], of this rank's rows; holds the sum then.
        """
        self.finish()
        rows = _rows_of_ranks(shares, self._lengths)
        total.copy_(shares[self._start : self._start + self._lengths[self._rank]])
        others = [(self._rank + step) % self._size for step in range(1, self._size)]
        size = (len(others), *total.shape)
        if self._room is None or self._room.numel() < size[0] * total.numel():
            self._room = shares.new_empty(size[0] * total.numel())
        arriving = self._room[: size[0] * total.numel()].view(size)
        landing = [as_bytes(x) for x in arriving]
        receives = [(peer, x) for peer, x in zip(reversed(others), landing, strict=True)]
        pending = exchange([(peer, rows[peer]) for peer in others], receives, group=self._group)
        self._under_way = (pending, arriving, total)

    def finish(self) -> None:
        """Wait for the lot that is under way, and sum it."""
        if self._under_way is None:
            return
        pending, arriving, total = self._under_way
        pending.wait()
        for share in arriving:
            total.add_(share)
        self._under_way = None

    @property
    def _start(self) -> int:
        return sum(self._lengths[: self._rank])


def _rows_of_ranks(buffer: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Each rank's rows."""
    return [as_bytes(rows) for rows in torch.split(buffer, list(lengths))]
