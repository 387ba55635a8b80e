"""A world in which only one rank exists, and receives copies of what it sends: results are finite and repeatable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm import transfer
from lightning_cp.compat.torch_names import fake_world


@contextmanager
def echo_world(ranks: int, rank: int = 0) -> Iterator[None]:
    """A fake world whose receive buffers are filled with what this rank has sent, repeated or cut to their size."""
    all_to_all, gather, batch = dist.all_to_all_single, transfer.all_gather_tensor, dist.batch_isend_irecv

    def exchanged(target: Tensor, source: Tensor, *args: Any, **kwargs: Any) -> Any:
        _fill(target, source)
        return all_to_all(target.new_empty(ranks), source.new_empty(ranks), group=kwargs["group"], async_op=True)

    def gathered(target: Tensor, source: Tensor, **kwargs: Any) -> Any:
        _fill(target, source)
        return gather(target.new_empty(ranks), source.new_empty(1), **kwargs)

    def batched(operations: list[Any]) -> Any:
        sent = [one.tensor for one in operations if one.op is dist.isend]
        for one in operations:
            if one.op is dist.irecv and sent:
                _fill(one.tensor, sent[0])
        return batch(operations)

    with (
        fake_world(ranks, rank),
        mock.patch.object(dist, "all_to_all_single", exchanged),
        mock.patch.object(transfer, "all_gather_tensor", gathered),
        mock.patch.object(dist, "batch_isend_irecv", batched),
    ):
        yield


def _fill(target: Tensor, source: Tensor) -> None:
    flat, size = source.reshape(-1), target.numel()
    target.view(-1).copy_(flat.repeat(-(-size // flat.numel()))[:size] if flat.numel() else flat.new_zeros(size))
