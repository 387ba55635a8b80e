"""Packets between stages that end with a mark: 1 if a stage has failed, and the packet has no values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_cp.comm.packet import Layout, Piece, pack_tensors, packet_bytes, unpack_tensors

_MARK = Piece((1,), torch.uint8)


def empty_packet(layout: Layout, device: torch.device) -> Tensor:
    """Allocate a packet for tensors of this layout, and the mark."""
    return torch.empty(packet_bytes([*layout, _MARK]), dtype=torch.uint8, device=device)


def packet_of(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Copy tensors into a packet."""
    return pack_tensors([*tensors, torch.zeros(1, dtype=torch.uint8, device=device)])


def failure_packet(layout: Layout, device: torch.device) -> Tensor:
    """Return the packet of a stage that has failed, in place of tensors of this layout."""
    packet = empty_packet(layout, device)
    unpack_tensors(packet, [*layout, _MARK])[-1].fill_(1)
    return packet


def read_packet(packet: Tensor, layout: Layout) -> tuple[list[Tensor], bool]:
    """Return views of the tensors in a received packet, and True if a stage has failed.

    Synchronises the host once: it must know whether to compute. A message between hosts would wait as long.
    """
    *tensors, mark = unpack_tensors(packet, [*layout, _MARK])
    return tensors, bool(mark.item())
