"""Compare tensors by a checksum of their bits."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 20  # elements, so that temporary memory stays below about 50 MB
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # constants of splitmix64, as signed integers


@torch.no_grad()
def checksum(x: Tensor) -> int:
    """Sum a 64-bit hash of (position, bits) over all elements, modulo 2^64.

    Equal bits give equal checksums on every device and for every stride. Synchronises the host.

    Args:
        x: any strided tensor.
    """
    x = torch.view_as_real(x) if x.is_complex() else x
    flat = x.detach().resolve_neg().contiguous().reshape(-1).view(_INTEGERS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].to(torch.int64)
        position = torch.arange(start, start + bits.numel(), dtype=torch.int64, device=x.device)
        total += _mixed(bits + position * _ODD[0]).sum()
    return int(total)


def _mixed(x: Tensor) -> Tensor:
    """Mix the bits of each element (splitmix64 with arithmetic shifts; the arithmetic wraps)."""
    x = (x ^ (x >> 30)) * _ODD[1]
    x = (x ^ (x >> 27)) * _ODD[2]
    return x ^ (x >> 31)
