"""A packet to every rank and one from each, under way while the caller computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def exchange_packets(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], *, group: dist.ProcessGroup) -> Packets:
    """Start to send each rank its packet, and to receive one from each.

    Args:
        outgoing: for each rank, uint8; must not change before `wait`.
        incoming: uint8, room for what each rank sends us; whatever read it before has been launched. Ours is not used.
    Ranks: all of `group`.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    by_rank = [outgoing[rank] if source == rank else packet for source, packet in enumerate(incoming)]
    peers = [((rank + step) % size, (rank - step) % size) for step in range(1, size)]
    sends, receives = [(to, outgoing[to]) for to, _ in peers], [(source, by_rank[source]) for _, source in peers]
    return Packets(by_rank, exchange(sends, receives, group=group))


def all_gather_packets(mine: Tensor, sizes_bytes: Sequence[int], *, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Every rank's packet, in rank order.

    Args:
        mine: uint8 [sizes_bytes[rank]]; may be empty.
        sizes_bytes: of every rank.
        group: None for a rank alone.
    Ranks: all of `group`, with equal sizes.
    """
    if group is None:
        return [mine]
    rank = dist.get_rank(group)
    incoming = [mine.new_empty(0 if source == rank else size) for source, size in enumerate(sizes_bytes)]
    packets = exchange_packets([mine] * len(incoming), incoming, group=group)
    packets.wait()
    return packets.by_rank
