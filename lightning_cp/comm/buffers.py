"""Pool of send and receive buffers, reused between calls.

CPU only: large freed blocks go back to the system, which zeroes each page again at the next allocation, at about the
cost of the transfer. On CUDA PyTorch's caching allocator already reuses memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cp.device_profile import device_type

_KEPT_BYTES, _KEPT = 64 << 20, 32


class Buffers:
    """Pool of the last 32 buffers given back, up to 64 MiB in total. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self.kept_bytes = 0  # total size of the buffers in the pool

    def take(self, size_bytes: int, like: Tensor) -> Tensor:
        """Return an uninitialized buffer on `like`'s device, uint8 [size_bytes]."""
        if device_type(like) != "cpu":
            return torch.empty(size_bytes, dtype=torch.uint8, device=like.device)
        for index, buffer in enumerate(self._kept):
            if buffer.numel() == size_bytes:
                self.kept_bytes -= size_bytes
                return self._kept.pop(index)
        with torch.inference_mode(False):  # it may be reused in training
            return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")

    def give(self, *buffers: Tensor) -> None:
        """Return buffers to the pool. The caller must not use them, or views of them, afterwards."""
        for buffer in buffers:
            size_bytes = buffer.numel()
            if device_type(buffer) == "cpu" and 0 < size_bytes <= _KEPT_BYTES:
                self._kept.append(buffer)
                self.kept_bytes += size_bytes
                while len(self._kept) > _KEPT or self.kept_bytes > _KEPT_BYTES:
                    self.kept_bytes -= self._kept.pop(0).numel()

    def kept(self) -> tuple[Tensor, ...]:
        """Return the buffers in the pool."""
        return tuple(self._kept)

    def forget(self) -> None:
        """Free all buffers in the pool."""
        self._kept.clear()
        self.kept_bytes = 0


BUFFERS = Buffers()  # one per process; on CPU attention runs forward and backward in one thread
