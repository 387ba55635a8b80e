"""How chunks pass from neighbour to neighbour round a ring, and how gradients of a chunk find their way home.

Step t of rank r deals with the chunk of rank (r - t) mod n, its own first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.buffers import BUFFERS
from lightning_cp.comm.packet import Layout, pack, packet_bytes, unpack
from lightning_cp.comm.transfer import Pending, exchange

LayoutOf = Callable[[int], Layout]


def rotate(
    local: Sequence[Tensor], layout: LayoutOf, *, group: dist.ProcessGroup
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield (owner, chunk) for every rank; the next chunk is under way while the caller uses this one.

    Args:
        local: this rank's chunk.
        layout: of each owner's chunk.
    Ranks: all of `group`, taking every chunk. Each sends n - 1 packets, of the chunks it passes on; at most two remote
        chunks are held: a chunk's memory is used again, and its list emptied, when the next one is asked for.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    buffer = pack(local, out=_take(layout(rank), local[0]))
    chunk = unpack(buffer, layout(rank))
    for step in range(size):
        owner = (rank - step) % size
        if step + 1 == size:
            yield owner, chunk
            chunk.clear()
            BUFFERS.give(buffer)
            return
        incoming = _take(layout((owner - 1) % size), buffer)
        pending = exchange([((rank + 1) % size, buffer)], [((rank - 1) % size, incoming)], group=group)
        yield owner, chunk
        chunk.clear()
        pending.wait()
        BUFFERS.give(buffer)
        buffer, chunk = incoming, unpack(incoming, layout((owner - 1) % size))


class RingGradReducer:
    """The sum for a chunk travels, as the chunk does: n - 1 packets a rank, each under way while more is computed.

    What is ours of our own chunk stays with the caller, who does best to compute some of it at the end, while the last
    packet is under way.
    """

    def __init__(self, layout: LayoutOf, *, group: dist.ProcessGroup) -> None:
        self._layout, self._group = layout, group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._pending: tuple[Pending, Tensor, Tensor, int] | None = None  # what leaves, what arrives, and its owner

    def add(self, owner: int, grads: Sequence[Tensor]) -> None:
        """Give this rank's share for another's chunk; in the order of the rotation."""
        layout = self._layout(owner)
        if self._pending is None:
            buffer = _take(layout, grads[0])
            for place, share in zip(unpack(buffer, layout), grads, strict=True):
                place.copy_(share)
        else:
            buffer = self._arrive(owner)
            for total, share in zip(unpack(buffer, layout), grads, strict=True):
                total.add_(share)
        expected = (owner - 1) % self._size
        incoming = _take(self._layout(expected), buffer)
        towards, source = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        pending = exchange([(towards, buffer)], [(source, incoming)], group=self._group)
        self._pending = (pending, buffer, incoming, expected)

    def finish(self, totals: Sequence[Tensor]) -> None:
        """Add the others' shares for this rank's own chunk to ours."""
        buffer = self._arrive(self._rank)
        for total, theirs in zip(totals, unpack(buffer, self._layout(self._rank)), strict=True):
            total.add_(theirs)
        BUFFERS.give(buffer)

    def _arrive(self, owner: int) -> Tensor:
        """The buffer with the sum for `owner`'s chunk so far."""
        assert self._pending is not None, "a transfer was started"
        pending, outgoing, incoming, expected = self._pending
        assert expected == owner, f"the sum for chunk {expected} arrived where {owner} was due"
        pending.wait()
        BUFFERS.give(outgoing)
        self._pending = None
        return incoming


def _take(layout: Layout, like: Tensor) -> Tensor:
    return BUFFERS.take(packet_bytes(layout), like)
