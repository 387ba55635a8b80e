"""Rows at a shard's two ends, swapped with the two neighbours only: no rank needs to know another's length."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cp.comm.packet import Piece, pack, packet_bytes, piece_of, unpack
from lightning_cp.comm.transfer import exchange
from lightning_cp.mesh import Groups


def border_rows(x: Tensor, dim: int, before: int, after: int, *, groups: Groups) -> tuple[Tensor | None, Tensor | None]:
    """The last `before` rows of the rank before this one, and the first `after` rows of the rank after it.

    Args:
        x: this rank's shard; other dims are equal on all ranks. Every rank has at least max(before, after) rows.
    Returns: the two pieces; None at an end of the sequence, and where none are asked for.
    Ranks: all of the context group, with equal `before` and `after`. Gradient: none, sampling only.
    """
    rank, last = groups.context_rank, groups.context_size - 1
    assert x.shape[dim] >= max(before, after), f"{x.shape[dim]} rows cannot give {max(before, after)} to a neighbour"
    sends: list[tuple[int, Tensor]] = []
    receives: list[tuple[int, Tensor, Piece]] = []
    if before and rank < last:
        sends.append((rank + 1, pack([x.narrow(dim, x.shape[dim] - before, before)])))
    if after and rank > 0:
        sends.append((rank - 1, pack([x.narrow(dim, 0, after)])))
    for peer, rows in ((rank - 1, before), (rank + 1, after)):
        if rows and 0 <= peer <= last:
            piece = piece_of(x, dim, rows)
            receives.append((peer, torch.empty(packet_bytes([piece]), dtype=torch.uint8, device=x.device), piece))
    if groups.context is not None and (sends or receives):
        exchange(sends, [(peer, buffer) for peer, buffer, _ in receives], group=groups.context).wait()
    found = {peer: unpack(buffer, [piece])[0] for peer, buffer, piece in receives}
    return found.get(rank - 1), found.get(rank + 1)


def packets_of_all(mine: Tensor, sizes_bytes: list[int], *, groups: Groups) -> list[Tensor]:
    """Every rank's packet, in rank order.

    Args:
        mine: uint8 [sizes_bytes[rank]]; may be empty. sizes_bytes: of every rank.
    Ranks: all of the context group, with equal sizes.
    """
    rank = groups.context_rank
    packets = [mine if peer == rank else mine.new_empty(size) for peer, size in enumerate(sizes_bytes)]
    others = [(peer, packet) for peer, packet in enumerate(packets) if peer != rank]
    if groups.context is not None:
        exchange([(peer, mine) for peer, _ in others], others, group=groups.context).wait()
    return packets
