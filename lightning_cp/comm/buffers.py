"""Bytes to send from and to receive in, used again from call to call.

On CPU only, where large memory that is freed goes back to the system and is zeroed, page by page, when it is asked for
again: about as costly as the transfer. On CUDA PyTorch's allocator keeps it, for everything else on the device too.
"""

from __future__ import annotations

import torch
from torch import Tensor

_KEPT_BYTES, _KEPT = 64 << 20, 32


class Buffers:
    """Kept between calls: the last 32 that were given back, up to 64 MiB. For one thread at a time."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def take(self, size_bytes: int, like: Tensor) -> Tensor:
        """Room on `like`'s device, uint8 [size_bytes], with anything in it."""
        for index, buffer in enumerate(self._kept):
            if buffer.numel() == size_bytes and like.device == buffer.device:
                return self._kept.pop(index)
        with torch.inference_mode(False):  # it may serve in training later
            return torch.empty(size_bytes, dtype=torch.uint8, device=like.device)

    def give(self, *buffers: Tensor) -> None:
        """Back, for another `take`. Nothing may read or write them, or a view of them, any more."""
        for buffer in buffers:
            if buffer.is_cpu and 0 < buffer.numel() <= _KEPT_BYTES:
                self._kept.append(buffer)
                while len(self._kept) > _KEPT or self.kept_bytes > _KEPT_BYTES:
                    self._kept.pop(0)

    @property
    def kept_bytes(self) -> int:
        """Of all that wait for a `take`."""
        return sum(buffer.numel() for buffer in self._kept)

    def forget(self) -> None:
        """Let all of them go."""
        self._kept.clear()


BUFFERS = Buffers()  # of the process, as its memory is; attention on CPU is called, and goes backward, in one thread
