"""Exchange of chunks around a ring, and reduction of their gradients at the owner.

In step t, rank r uses the chunk of rank (r - t) mod n; in step 0 its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.packet import BUFFERS, Layout, pack_tensors, packet_bytes, unpack_tensors
from lightning_cp.comm.transfer import Pending, exchange

LayoutOf = Callable[[int], Layout]


def rotate(
    local: Sequence[Tensor], layout: LayoutOf, *, group: dist.ProcessGroup
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield (owner, chunk) for every rank; the next chunk is received while the caller uses the current one.

    A chunk is valid only until the next one is requested: its list is then emptied and its memory reused.

    Args:
        local: this rank's chunk.
        layout: function that returns the layout of an owner's chunk.
    Ranks: all of `group`; each must consume all chunks. Each sends n - 1 packets and holds at most two remote chunks.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    buffer = pack_tensors(local, out=_take(layout(rank), local[0]))
    chunk = unpack_tensors(buffer, layout(rank))
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
        buffer, chunk = incoming, unpack_tensors(incoming, layout((owner - 1) % size))


class RingGradReducer:
    """Ring reduction of chunk gradients: partial sums follow the chunks around the ring to the owner.

    Each rank sends n - 1 packets, each overlapping with the computation of the next gradients. The caller keeps this
    rank's gradients of its own chunk. To overlap the last packet, compute part of them between the last `add` and
    `finish`.
    """

    def __init__(self, layout: LayoutOf, *, group: dist.ProcessGroup) -> None:
        self._layout, self._group = layout, group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._pending: tuple[Pending, Tensor, Tensor, int] | None = None  # (transfer, sent, received, owner)

    def add(self, owner: int, grads: Sequence[Tensor]) -> None:
        """Add this rank's gradients of `owner`'s chunk and send the sum on. Call it in the order of `rotate`."""
        layout = self._layout(owner)
        if self._pending is None:
            buffer = _take(layout, grads[0])
            for view, grad in zip(unpack_tensors(buffer, layout), grads, strict=True):
                view.copy_(grad)
        else:
            buffer = self._receive(owner)
            for total, grad in zip(unpack_tensors(buffer, layout), grads, strict=True):
                total.add_(grad)
        expected = (owner - 1) % self._size
        incoming = _take(self._layout(expected), buffer)
        target, source = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        pending = exchange([(target, buffer)], [(source, incoming)], group=self._group)
        self._pending = (pending, buffer, incoming, expected)

    def finish(self, totals: Sequence[Tensor]) -> None:
        """Add the other ranks' gradients of this rank's chunk to `totals`."""
        buffer = self._receive(self._rank)
        for total, partial in zip(totals, unpack_tensors(buffer, self._layout(self._rank)), strict=True):
            total.add_(partial)
        BUFFERS.give(buffer)

    def _receive(self, owner: int) -> Tensor:
        """Wait for the partial sum of `owner`'s chunk. Returns: the buffer that holds it."""
        assert self._pending is not None, "no transfer was started: call `add` first"
        pending, outgoing, incoming, expected = self._pending
        assert expected == owner, f"received the sum for chunk {expected}, expected chunk {owner}"
        pending.wait()
        BUFFERS.give(outgoing)
        self._pending = None
        return incoming


def _take(layout: Layout, like: Tensor) -> Tensor:
    return BUFFERS.take(packet_bytes(layout), like)
