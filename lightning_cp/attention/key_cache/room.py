"""Memory for keys and values to which chunks are added and from which chunks are dropped, without reallocation."""

from __future__ import annotations

import torch
from torch import Tensor


class KeyRoom:
    """Two tensors [batch, room, heads, head_dim] for keys and values; the first tokens are in use.

    Autograd never saves them: with gradients, `KeyCache` concatenates what it reads.

    Args: like: a key [batch, tokens, heads, head_dim]. capacity: number of tokens for which room is made.
    """

    def __init__(self, like: Tensor, capacity: int) -> None:
        self._tensors = [_room_like(like, capacity) for _ in range(2)]

    @property
    def num_bytes(self) -> int:
        """Bytes of both tensors."""
        return sum(x.nbytes for x in self._tensors)

    @torch.no_grad()
    def write(self, start: int, key: Tensor, value: Tensor) -> None:
        """Write tokens at `start`. If they do not fit, twice the room is allocated."""
        end = start + key.shape[1]
        for i, (kept, x) in enumerate(zip(self._tensors, (key, value), strict=True)):
            if end > kept.shape[1]:
                self._tensors[i] = _room_like(kept, max(2 * kept.shape[1], end))
                self._tensors[i][:, :start] = kept[:, :start]
            self._tensors[i][:, start:end] = x

    def read(self, length: int) -> tuple[Tensor, Tensor]:
        """Return views of the first `length` keys and values."""
        key, value = (x[:, :length] for x in self._tensors)
        return key, value

    @torch.no_grad()
    def drop(self, start: int, length: int, used: int) -> None:
        """Drop `length` tokens at `start`: move those after them, up to `used`, without other memory."""
        for x in self._tensors:
            for at in range(start, used - length, max(length, 1)) if length else ():
                end = min(at + length, used - length)
                x[:, at:end] = x[:, at + length : end + length]


def _room_like(x: Tensor, tokens: int) -> Tensor:
    with torch.inference_mode(False):  # an inference tensor could not be written outside of inference mode
        return torch.empty(x.shape[0], tokens, *x.shape[2:], dtype=x.dtype, device=x.device)
