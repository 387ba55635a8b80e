"""One message, of several tensors, to every rank of a group, in one collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.packet import Layout, layout_of, pack, packet_bytes, unpack
from lightning_cp.comm.transfer import all_to_all


def swap(
    messages: Sequence[Sequence[Tensor]], layouts: Sequence[Layout], *, group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """Send `messages[i]` to rank i of `group`; receive what rank i sent us, laid out as `layouts[i]`.

    Ranks: all of `group`. Bytes: the packets' sizes, each piece rounded up to 16.
    """
    sizes = [packet_bytes(layout_of(message)) for message in messages]
    outgoing = torch.empty(sum(sizes), dtype=torch.uint8, device=messages[0][0].device)
    for part, message in zip(torch.split(outgoing, sizes), messages, strict=True):
        pack(message, out=part)
    expected = [packet_bytes(layout) for layout in layouts]
    incoming = all_to_all(outgoing, expected, sizes, group=group)
    return [unpack(part, layout) for part, layout in zip(torch.split(incoming, expected), layouts, strict=True)]
