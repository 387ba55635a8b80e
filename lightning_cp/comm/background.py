"""A small all-gather in the background: started now, read later, while the device and the host go on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.transfer import all_gather_tensor
from lightning_cp.mesh import moves_cuda_by


@dataclass(eq=False)
class BackgroundGather:
    """An all-gather under way.

    Attributes:
        work: torch's handle.
        gathered: float64 [ranks, values], on the host, once the all-gather is done.
        held: tensors on the device that must live until then.
        copied: recorded after the copy to the host (CUDA); None on CPU.
    """

    work: Any
    gathered: Tensor
    held: tuple[Tensor, ...] = ()
    copied: torch.cuda.Event | None = None

    def is_done(self, *, within_s: float = 0.0) -> bool:
        """Whether `read` returns at once, after at most `within_s` seconds."""
        until = time.monotonic() + within_s
        while not self._is_done() and time.monotonic() < until:
            time.sleep(0.001)
        return self._is_done()

    def _is_done(self) -> bool:
        return bool(self.work.is_completed() if self.copied is None else self.copied.query())  # type: ignore[no-untyped-call]

    def read(self) -> npt.NDArray[np.float64]:
        """The values of every rank, [ranks, values]. Waits for them on the host."""
        if self.copied is None:
            self.work.wait()
        else:
            self.copied.synchronize()
        self.held = ()
        values: npt.NDArray[np.float64] = self.gathered.numpy()
        return values


def gather_device(group: dist.ProcessGroup) -> torch.device:
    """Where `gather_in_background` takes its values from: the GPU for NCCL, else the CPU."""
    if moves_cuda_by("nccl", group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def gather_in_background(values: Tensor, *, group: dist.ProcessGroup) -> BackgroundGather:
    """Start to gather float64 values [values] of every rank.

    On CUDA the copy to the host runs on a stream of its own: neither the host nor the current stream waits.

    Ranks: all of `group`, with as many values each, on `gather_device`.
    """
    ranks = dist.get_world_size(group)
    everyone = values.new_empty(ranks * values.numel())
    work = all_gather_tensor(everyone, values, group=group, async_op=True)
    if values.device.type != "cuda":
        return BackgroundGather(work, everyone.view(ranks, -1), (values,))
    host = torch.empty(everyone.shape, dtype=everyone.dtype, device="cpu", pin_memory=True)
    copied, side = torch.cuda.Event(), torch.cuda.Stream(values.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        work.wait()  # of this stream alone
        host.copy_(everyone, non_blocking=True)
        copied.record(side)
    return BackgroundGather(work, host.view(ranks, -1), (values, everyone), copied)
