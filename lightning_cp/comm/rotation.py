"""How the ranks of a ring see each other's chunks, and how gradients of a chunk find their way home.

Two ways, the same for the caller: `neighbour` passes chunks on, one step ahead of their use; `direct` fetches every
chunk from its owner at once. In both, step t of rank r deals with the chunk of rank (r - t) mod n, its own first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.packet import Layout, layout_of, pack, packet_bytes, unpack
from lightning_cp.comm.transfer import Pending, exchange

LayoutOf = Callable[[int], Layout]


def rotate_neighbour(
    local: Sequence[Tensor], layout: LayoutOf, *, group: dist.ProcessGroup
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield (owner, chunk) for every rank; the next chunk is under way while the caller uses this one.

    Args:
        local: this rank's chunk.
        layout: of each owner's chunk.
    Ranks: all of `group`, taking every chunk. Each sends n - 1 packets, of the chunks it passes on; at most two remote
        chunks are held: a chunk's list is emptied when the next one is asked for.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    buffer = pack(local)
    chunk = list(local)
    for step in range(size):
        owner = (rank - step) % size
        if step + 1 == size:
            yield owner, chunk
            return
        incoming = _empty(layout((owner - 1) % size), buffer)
        pending = exchange([((rank + 1) % size, buffer)], [((rank - 1) % size, incoming)], group=group)
        yield owner, chunk
        chunk.clear()
        pending.wait()
        buffer, chunk = incoming, unpack(incoming, layout((owner - 1) % size))


def rotate_direct(
    local: Sequence[Tensor], layout: LayoutOf, *, group: dist.ProcessGroup
) -> Iterator[tuple[int, list[Tensor]]]:
    """As `rotate_neighbour`, but every chunk comes from its owner, and all are under way from the start.

    Ranks: all of `group`. Each sends its own packet n - 1 times; n - 1 remote chunks are held.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    buffer = pack(local)
    arriving: list[tuple[int, Tensor, Pending]] = []
    for step in range(1, size):
        owner = (rank - step) % size
        incoming = _empty(layout(owner), buffer)
        arriving.append((owner, incoming, exchange([((rank + step) % size, buffer)], [(owner, incoming)], group=group)))
    yield rank, list(local)
    for owner, incoming, pending in arriving:
        pending.wait()
        yield owner, unpack(incoming, layout(owner))


class Homing(Protocol):
    """Sums what each rank computed for a chunk, at its owner."""

    def add(self, owner: int, grads: Sequence[Tensor]) -> None:
        """Give this rank's share for `owner`'s chunk; in the order of the rotation."""
        ...

    def finish(self) -> list[Tensor]:
        """The sums for this rank's own chunk."""
        ...


class NeighbourHoming:
    """The sum for a chunk travels with it: n - 1 packets a rank, each under way while the next share is computed."""

    def __init__(self, layout: LayoutOf, *, group: dist.ProcessGroup) -> None:
        self._layout, self._group = layout, group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._home: list[Tensor] = []
        self._pending: tuple[Pending, Tensor, int] | None = None  # transfer, buffer, owner of what arrives

    def add(self, owner: int, grads: Sequence[Tensor]) -> None:
        if owner == self._rank:
            self._home = list(grads)
            return
        buffer = pack(grads)
        if self._pending is not None:
            arrived = self._arrive(owner)
            for total, share in zip(unpack(buffer, layout_of(grads)), arrived, strict=True):
                total.add_(share)
        expected = (owner - 1) % self._size
        incoming = _empty(self._layout(expected), buffer)
        towards, source = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        self._pending = (exchange([(towards, buffer)], [(source, incoming)], group=self._group), incoming, expected)

    def finish(self) -> list[Tensor]:
        if self._pending is None:
            return self._home
        return [mine.add_(rest) for mine, rest in zip(self._home, self._arrive(self._rank), strict=True)]

    def _arrive(self, owner: int) -> list[Tensor]:
        assert self._pending is not None, "a transfer was started"
        pending, incoming, expected = self._pending
        assert expected == owner, f"the sum for chunk {expected} arrived where {owner} was due"
        pending.wait()
        self._pending = None
        return unpack(incoming, self._layout(owner))


class DirectHoming:
    """Each share goes straight to the owner, which adds it: n - 1 packets a rank."""

    def __init__(self, layout: LayoutOf, *, group: dist.ProcessGroup) -> None:
        self._layout, self._group = layout, group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._home: list[Tensor] = []
        self._pending: tuple[Pending, Tensor] | None = None

    def add(self, owner: int, grads: Sequence[Tensor]) -> None:
        if owner == self._rank:
            self._home = list(grads)
            return
        self._arrive()
        buffer = pack(grads)
        incoming = _empty(self._layout(self._rank), buffer)
        source = (2 * self._rank - owner) % self._size  # as far ahead of us as the owner is behind
        self._pending = (exchange([(owner, buffer)], [(source, incoming)], group=self._group), incoming)

    def finish(self) -> list[Tensor]:
        self._arrive()
        return self._home

    def _arrive(self) -> None:
        if self._pending is None:
            return
        pending, incoming = self._pending
        pending.wait()
        for mine, share in zip(self._home, unpack(incoming, self._layout(self._rank)), strict=True):
            mine.add_(share)
        self._pending = None


def _empty(layout: Layout, like: Tensor) -> Tensor:
    return torch.empty(packet_bytes(layout), dtype=torch.uint8, device=like.device)
