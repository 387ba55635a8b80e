"""A packet to every rank and one from each, under way while the caller computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.transfer import Pending, exchange


@dataclass(frozen=True)
class Packets:
    """From every rank, in rank order; others' may be read after `wait`, our own, which was not sent, at once."""

    by_rank: list[Tensor]
    pending: Pending

    def wait(self) -> None:
        """Until they are there; as often as one likes."""
        self.pending.wait()


def exchange_packets(
    outgoing: Sequence[Tensor], sizes_bytes: Sequence[int], room: Tensor, *, group: dist.ProcessGroup
) -> Packets:
    """Start to send each rank its packet, and to receive one from each.

    Args:
        outgoing: for each rank, uint8; must not change before `wait`.
        sizes_bytes: of what each rank sends us.
        room: uint8, of at least the sum of these, where they are put; whatever read it before has been launched.
    Ranks: all of `group`.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    by_rank = list(torch.split(room[: sum(sizes_bytes)], list(sizes_bytes)))
    by_rank[rank] = outgoing[rank]
    peers = [((rank + step) % size, (rank - step) % size) for step in range(1, size)]
    sends, receives = [(to, outgoing[to]) for to, _ in peers], [(source, by_rank[source]) for _, source in peers]
    return Packets(by_rank, exchange(sends, receives, group=group))
