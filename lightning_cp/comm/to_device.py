"""Copy tensors from the host to a GPU without making the host wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
