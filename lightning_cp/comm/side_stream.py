"""Copy between a GPU and pinned host memory on a stream next to that of the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
