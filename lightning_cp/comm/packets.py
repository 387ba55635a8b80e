"""All-gather of packets and of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.packet import Layout, pack_tensors, packet_bytes, unpack_tensors
from lightning_cp.comm.transfer import gather_flat


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
