"""One message, of several tensors, to every rank of a group, all at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.packet import as_bytes
from lightning_cp.comm.transfer import exchange


def swap(
    messages: Sequence[Sequence[Tensor]], landings: Sequence[Sequence[Tensor]], *, group: dist.ProcessGroup
) -> None:
    """Send `messages[i]` to rank i of `group`, and receive what rank i sends in `landings[i]`.

    Tensors go straight from where they are, if they are contiguous, to where they belong: nothing is packed.

    Args: landings: contiguous tensors, of the shapes and dtypes that the others send.
    Ranks: all of `group`. Bytes: those of the tensors.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for landing, x in zip(landings[rank], messages[rank], strict=True):
        landing.copy_(x)
    peers = [((rank + step) % size, (rank - step) % size) for step in range(1, size)]
    sends = [(target, as_bytes(x.contiguous())) for target, _ in peers for x in messages[target]]
    receives = [(source, as_bytes(x)) for _, source in peers for x in landings[source]]
    exchange(sends, receives, group=group).wait()
