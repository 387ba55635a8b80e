"""All-to-all of messages, each a list of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.buffers import BUFFERS
from lightning_cp.comm.packet import as_bytes
from lightning_cp.comm.transfer import exchange


def all_to_all(
    messages: Sequence[Sequence[Tensor]], recv_buffers: Sequence[Sequence[Tensor]], *, group: dist.ProcessGroup
) -> None:
    """Send `messages[i]` to rank i of `group`, and receive the message of rank i into `recv_buffers[i]`.

    Contiguous tensors are sent and received without a copy; others are copied through a buffer.

    Args:
        messages: for each rank, the tensors to send.
        recv_buffers: for each rank, tensors with the shapes and dtypes that it sends.
    Ranks: all of `group`. Bytes: those of the tensors.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    peers = [((rank + step) % size, (rank - step) % size) for step in range(1, size)]
    taken: list[Tensor] = []

    def contiguous(x: Tensor) -> Tensor:
        """Return `x` if it is contiguous, otherwise a buffer of its shape."""
        if x.is_contiguous():
            return x
        taken.append(BUFFERS.take(x.numel() * x.element_size(), x))
        return taken[-1].view(x.dtype).view(x.shape)

    sends, receives, copies = [], [], []
    for target, source in peers:
        for x in messages[target]:
            sent = contiguous(x)
            sends.append((target, as_bytes(sent if sent is x else sent.copy_(x))))
        for recv_buffer in recv_buffers[source]:
            staging = contiguous(recv_buffer)
            receives.append((source, as_bytes(staging)))
            if staging is not recv_buffer:
                copies.append((recv_buffer, staging))
    pending = exchange(sends, receives, group=group)
    for recv_buffer, x in zip(recv_buffers[rank], messages[rank], strict=True):
        recv_buffer.copy_(x)
    pending.wait()
    for recv_buffer, staging in copies:
        recv_buffer.copy_(staging)
    BUFFERS.give(*taken)
