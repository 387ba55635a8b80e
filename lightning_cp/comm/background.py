"""Work that runs while the host goes on: small all-gathers that are read later, and copies to and from GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.transfer import all_gather_tensor
from lightning_cp.mesh.groups import cuda_backend_is

_TIMED_OUT = "Timed out"  # in errors of gloo


@dataclass(eq=False)
class BackgroundGather:
    """An all-gather in progress.

    Attributes:
        work: handle of `torch.distributed`.
        gathered: float64 [ranks, values] on the host, valid once the all-gather is done.
        kept_alive: tensors on the device that must stay alive until then.
        copied: CUDA event recorded after the copy to the host; None on CPU.
    """

    work: Any
    gathered: Tensor
    kept_alive: tuple[Tensor, ...] = ()
    copied: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        _unread.add(self)

    def is_done(self, *, within_s: float = 0.0) -> bool:
        """Return True once `read` would not block; False if it still would after `within_s` seconds."""
        until = time.monotonic() + within_s
        while not self._is_done() and time.monotonic() < until:
            time.sleep(0.001)
        return self._is_done()

    def _is_done(self) -> bool:
        return bool(self.work.is_completed() if self.copied is None else self.copied.query())  # type: ignore[no-untyped-call]

    def read(self) -> npt.NDArray[np.float64]:
        """Return the values of every rank, [ranks, values]. Blocks the host until they have arrived.

        Raises: RuntimeError: a rank did not start this all-gather within the time-out of the group, or has ended.
        """
        if self.copied is None:
            try:
                self.work.wait()
            except RuntimeError as error:
                if _TIMED_OUT not in str(error):
                    raise
                raise RuntimeError(
                    "another rank did not take part in an exchange before the time-out of the process group: it has "
                    "not made this call of the model or pipeline, or it hangs. All ranks must make the same calls; "
                    f"the job must end ({error})"
                ) from error
        else:
            self.copied.synchronize()
        self.kept_alive = ()
        _unread.discard(self)
        values: npt.NDArray[np.float64] = self.gathered.numpy()
        return values


_unread: WeakSet[BackgroundGather] = WeakSet()


def wait_for_gathers(*, within_s: float) -> None:
    """Wait until all unread gathers are done, at most `within_s` seconds. Call it before their groups are destroyed."""
    until = time.monotonic() + within_s
    for gather in list(_unread):
        gather.is_done(within_s=until - time.monotonic())


def gather_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device that `gather_in_background` needs its values on: the GPU with NCCL, otherwise the CPU.

    A simulated world behaves as NCCL does, once this process uses a GPU: with values on the CPU, the host would wait.
    """
    if cuda_backend_is("nccl", group) or (cuda_backend_is("fake", group) and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def gather_in_background(values: Tensor, *, group: dist.ProcessGroup) -> BackgroundGather:
    """Start to all-gather float64 values [values] from every rank.

    On CUDA the copy to the host runs on a separate stream: neither the host nor the current stream waits.

    Ranks: all of `group`, with equally many values, on `gather_device`.
    """
    ranks = dist.get_world_size(group)
    gathered = values.new_empty(ranks * values.numel())
    work = all_gather_tensor(gathered, values, group=group, async_op=True)
    if values.device.type != "cuda":
        return BackgroundGather(work, gathered.view(ranks, -1), (values,))
    host = torch.empty(gathered.shape, dtype=gathered.dtype, device="cpu", pin_memory=True)
    copied, side = torch.cuda.Event(), torch.cuda.Stream(values.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        work.wait()  # only the side stream waits
        host.copy_(gathered, non_blocking=True)
        copied.record(side)
    for x in (values, gathered):  # a gather may be dropped before it is read; its memory is then still in use here
        x.record_stream(side)
    return BackgroundGather(work, host.view(ranks, -1), (values, gathered), copied)


class SideStream:
    """A CUDA stream for copies, which overlap with the kernels of the current stream. On a CPU, copies run at once.

    Allocate the targets of copies to the GPU on the current stream, which uses them last: once they are freed, other
    kernels can get the memory at once, however far the host is ahead. Memory of the side stream could be reused only
    after the GPU has used it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Let the next copies wait for the current stream's work so far, which may use their memory."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def copy(self, target: Tensor, source: Tensor) -> Tensor:
        """Copy a tensor without waiting; memory of the host must be pinned. Returns: the target."""
        if self._stream is None:
            return target.copy_(source)
        with torch.cuda.stream(self._stream):
            return target.copy_(source, non_blocking=True)

    def record(self) -> Any:
        """Return an event after the copies so far; None without a GPU."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Let the current stream wait for an event of `record`."""
        if event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(event)


Device = torch.device | str | None


def to_device(x: Tensor, device: Device) -> Tensor:
    """Copy to a device (None: the tensor's); the host waits only for a copy from a GPU to the host.

    A copy from ordinary memory to a GPU waits until the GPU has finished all earlier work. This one goes through pinned
    memory, which PyTorch does not reuse before the copy is done.
    """
    if x.device.type == "cpu" and device is not None and torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x if device is None else x.to(device)


def numbers_on(device: Device, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return numbers as a tensor [n] on a device. `torch.tensor(values, device=device)` makes the host wait."""
    return to_device(torch.tensor(values, dtype=dtype, device="cpu"), device)


def is_capturing() -> bool:
    """Return True while a CUDA graph is captured: the host cannot read anything then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
