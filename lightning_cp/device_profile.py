"""The kind of device that code behaves for: that of a tensor, or in a dry run that of the device to be planned for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeviceProfile:
    """A device for which a dry run behaves.

    Attributes:
        name: for messages.
        kind: "cuda": kernels, sizes of transfers, merge and optimizer of a GPU; "cpu": those of a CPU.
        capability: compute capability of a GPU.
    """

    name: str = "cpu"
    kind: Literal["cpu", "cuda"] = "cpu"
    capability: tuple[int, int] = (9, 0)


CPU = DeviceProfile()


class _Assumed:
    profile: DeviceProfile | None = None


_ASSUMED = _Assumed()


@contextmanager
def assuming(profile: DeviceProfile) -> Iterator[None]:
    """Behave as on the device of `profile` inside the context, wherever the tensors are."""
    before, _ASSUMED.profile = _ASSUMED.profile, profile
    try:
        yield
    finally:
        _ASSUMED.profile = before


def device_type(x: Tensor) -> str:
    """Return the type of the device that code behaves for: "cpu", "cuda" or another one of torch."""
    return x.device.type if _ASSUMED.profile is None else _ASSUMED.profile.kind


def is_assumed() -> bool:
    """Return True in a dry run: kernels that need a device cannot be launched."""
    return _ASSUMED.profile is not None


def compute_capability(x: Tensor) -> tuple[int, int]:
    """Return the compute capability of the GPU of `x`."""
    return torch.cuda.get_device_capability(x.device) if _ASSUMED.profile is None else _ASSUMED.profile.capability
