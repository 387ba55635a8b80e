"""Asynchronous all-to-all and all-gather of packets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.packet import Layout, pack, packet_bytes, unpack
from lightning_cp.comm.transfer import Pending, exchange


@dataclass(frozen=True)
class Packets:
    """Packets from all ranks, in rank order. This rank's own packet is valid at once, the others after `wait`."""

    by_rank: list[Tensor]
    pending: Pending

    def wait(self) -> None:
        """Wait for all packets. May be called repeatedly."""
        self.pending.wait()


def exchange_packets(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], *, group: dist.ProcessGroup) -> Packets:
    """Start to send a packet to each rank, and to receive one from each.

    Args:
        outgoing: uint8 packet for each rank; must not change before `wait`.
        incoming: uint8 receive buffer for each rank; this rank's own is not used. Earlier reads of the buffers must
            have been launched.
    Ranks: all of `group`.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    by_rank = [outgoing[rank] if source == rank else packet for source, packet in enumerate(incoming)]
    peers = [((rank + step) % size, (rank - step) % size) for step in range(1, size)]
    sends, receives = [(to, outgoing[to]) for to, _ in peers], [(source, by_rank[source]) for _, source in peers]
    return Packets(by_rank, exchange(sends, receives, group=group))


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
    rank = dist.get_rank(group)
    incoming = [mine.new_empty(0 if source == rank else size) for source, size in enumerate(sizes_bytes)]
    packets = exchange_packets([mine] * len(incoming), incoming, group=group)
    packets.wait()
    return packets.by_rank


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
    packet = pack(mine) if mine else torch.empty(0, dtype=torch.uint8, device=device)
    packets = all_gather_packets(packet, [packet_bytes(layout) for layout in layouts], group=group)
    return [unpack(packet, layout) for packet, layout in zip(packets, layouts, strict=True)]
