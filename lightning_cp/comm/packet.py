"""Packets: several tensors in one flat byte buffer, sent in one transfer; all-gathers of packets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.transfer import gather_flat

_ALIGNMENT_BYTES = 16  # a valid start address for every dtype


class Piece(NamedTuple):
    """Shape and dtype of one tensor in a packet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Size of the elements in bytes, without padding."""
        return self.elements * self.dtype.itemsize


Layout = Sequence[Piece]


def piece_of(x: Tensor, dim: int, length: int) -> Piece:
    """Return a piece with the shape and dtype of `x`, but `length` along `dim`."""
    shape = list(x.shape)
    shape[dim] = length
    return Piece(tuple(shape), x.dtype)


def layout_of(tensors: Sequence[Tensor]) -> Layout:
    """Return the layout of `pack(tensors)`."""
    return [Piece(tuple(x.shape), x.dtype) for x in tensors]


def packet_bytes(layout: Layout) -> int:
    """Return the size of a packet in bytes; each piece is padded to a multiple of 16."""
    return sum(_padded(piece.size_bytes) for piece in layout)


def pack_tensors(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Copy `tensors` into one buffer, uint8 [packet_bytes]: into `out`, or a new one if it is None."""
    layout = layout_of(tensors)
    if out is None:
        out = torch.empty(packet_bytes(layout), dtype=torch.uint8, device=tensors[0].device)
    for view, x in zip(unpack_tensors(out, layout), tensors, strict=True):
        view.copy_(x)
    return out


def unpack_tensors(buffer: Tensor, layout: Layout) -> list[Tensor]:
    """Return contiguous views into `buffer` [packet_bytes], one for each piece."""
    views, start = [], 0
    for piece in layout:
        views.append(buffer[start : start + piece.size_bytes].view(piece.dtype).view(piece.shape))
        start += _padded(piece.size_bytes)
    return views


def as_bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor as uint8 [x.nbytes], since not every backend sends every dtype."""
    return x.view(-1).view(torch.uint8)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def all_gather_packets(mine: Tensor, sizes_bytes: Sequence[int], *, group: dist.ProcessGroup | None) -> list[Tensor]:
    """All-gather a packet from every rank, in rank order.

    Args:
        mine: uint8 [sizes_bytes[rank]]; may be empty.
        sizes_bytes: packet size of each rank, in rank order.
        group: process group; None for one rank.
    Ranks: all of `group`, with equal `sizes_bytes`.
    """
    if group is None:
        return [mine]
    received = mine.new_empty(sum(sizes_bytes))
    gather_flat(mine, received, sizes_bytes, group=group).wait()
    return list(torch.split(received, list(sizes_bytes)))


def all_gather_tensors(
    mine: Sequence[Tensor], layouts: Sequence[Layout], *, device: torch.device, group: dist.ProcessGroup | None
) -> list[list[Tensor]]:
    """All-gather tensors from every rank in one packet per rank.

    Args:
        mine: this rank's tensors, in the layout `layouts[rank]`; may be none.
        layouts: layout of each rank's tensors, in rank order.
        device: device of the tensors.
        group: process group; None for one rank.
    Returns: the tensors of each rank, in rank order; this rank's are copies.
    Ranks: all of `group`, with equal `layouts`.
    """
    packet = pack_tensors(mine) if mine else torch.empty(0, dtype=torch.uint8, device=device)
    packets = all_gather_packets(packet, [packet_bytes(layout) for layout in layouts], group=group)
    return [unpack_tensors(packet, layout) for packet, layout in zip(packets, layouts, strict=True)]
