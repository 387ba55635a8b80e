"""CUDA tensors without a device: fake tensors, a fake process group, and a record of what crosses between devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_cp.attention import merge as merging
from lightning_cp.comm import transfer
from lightning_cp.kernels import PartialAttention

WORLD, RANK = 4, 1


@contextmanager
def fake_ranks() -> Iterator[None]:
    """Rank 1 of a process group of 4 with collectives that send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


class CrossingRecorder(TorchDispatchMode):
    """Records every operator that reads tensors of one device and writes, or also reads, another."""

    def __init__(self) -> None:
        super().__init__()
        self.crossings: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = {
            x.device.type for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor) and x.ndim
        }  # 0-dim CPU tensors are legal arguments of CUDA operators
        # Our own operators return the exchanged lengths on the host on purpose.
        if len(devices) > 1 and func.namespace != "lightning_cp":
            self.crossings.append(str(func))
        return result


def _merge_in_place(a: PartialAttention, b: PartialAttention) -> PartialAttention:
    """Check what the Triton kernel requires of its arguments; a launch needs a device."""
    assert a.out.dtype == a.lse.dtype == b.lse.dtype == torch.float32
    assert {x.device.type for x in (*a, *b)} == {"cuda"}
    return a


@contextmanager
def fake_cuda() -> Iterator[CrossingRecorder]:
    """Context with fake CUDA tensors on an H100 and with NCCL. `.item()` and similar calls raise an error."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(transfer, "cuda_backend_is", lambda backend, group: backend == "nccl"),
        mock.patch.object(merging, "_has_triton", return_value=True),
        mock.patch.dict(
            "sys.modules", {"lightning_cp.attention.merge_triton": mock.Mock(merge_in_place=_merge_in_place)}
        ),
        CrossingRecorder() as recorder,
    ):
        yield recorder
