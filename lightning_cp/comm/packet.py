"""Packets: several tensors in one flat byte buffer, sent in one transfer; all-gathers of packets; a pool of buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.transfer import gather_flat
from lightning_cp.device_profile import device_type

_ALIGNMENT_BYTES = 16  # a valid start address for every dtype
_KEPT_BYTES, _KEPT = 64 << 20, 32


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
    """Return views into `buffer` [..., packet_bytes], one [..., *shape] for each piece; of one packet, contiguous."""
    views, start = [], 0
    for piece in layout:
        of_piece = buffer[..., start : start + piece.size_bytes].view(piece.dtype)
        views.append(of_piece.view((*buffer.shape[:-1], *piece.shape)))
        start += _padded(piece.size_bytes)
    return views


def as_bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor as uint8 [x.nbytes], since not every backend sends every dtype."""
    return x.view(-1).view(torch.uint8)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


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
    sizes_bytes = [packet_bytes(layout) for layout in layouts]
    packets: Sequence[Tensor] = [packet]
    if group is not None:
        received = packet.new_empty(sum(sizes_bytes))
        gather_flat(packet, received, sizes_bytes, group=group).wait()
        packets = torch.split(received, sizes_bytes)
    return [unpack_tensors(packet, layout) for packet, layout in zip(packets, layouts, strict=True)]


class Buffers:
    """Pool of the last 32 send and receive buffers given back, up to 64 MiB in total. Not thread-safe.

    CPU only: large freed blocks go back to the system, which zeroes each page again at the next allocation, at about
    the cost of the transfer. On CUDA PyTorch's caching allocator already reuses memory.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self.kept_bytes = 0  # total size of the buffers in the pool

    def take(self, size_bytes: int, like: Tensor) -> Tensor:
        """Return an uninitialized buffer on `like`'s device, uint8 [size_bytes]."""
        if device_type(like) != "cpu":
            return torch.empty(size_bytes, dtype=torch.uint8, device=like.device)
        for index, buffer in enumerate(self._kept):
            if buffer.numel() == size_bytes:
                self.kept_bytes -= size_bytes
                return self._kept.pop(index)
        with torch.inference_mode(False):  # it may be reused in training
            return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def give(self, *buffers: Tensor) -> None:
        """Return buffers to the pool. The caller must not use them, or views of them, afterwards."""
        for buffer in buffers:
            size_bytes = buffer.numel()
            if device_type(buffer) == "cpu" and 0 < size_bytes <= _KEPT_BYTES:
                self._kept.append(buffer)
                self.kept_bytes += size_bytes
                while len(self._kept) > _KEPT or self.kept_bytes > _KEPT_BYTES:
                    self.kept_bytes -= self._kept.pop(0).numel()

    def forget(self) -> None:
        """Free all buffers in the pool."""
        self._kept.clear()
        self.kept_bytes = 0


BUFFERS = Buffers()  # one per process; on CPU attention runs forward and backward in one thread
