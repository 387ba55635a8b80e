"""Numbers that describe tensors, to compare these between ranks: checksums of their bits, norms and projections."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_cp.compat.torch_names import is_fake, is_traceable_wrapper_subclass

# Words (8 bytes) at a time: on CPUs so few that they stay in the cache, on GPUs about 50 MB of temporary memory.
_CHUNK, _CHUNK_ON_GPU = 1 << 15, 1 << 21
_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # constants of splitmix64, as signed integers


def checksum(x: Tensor) -> int:
    """Sum a 64-bit hash of (position, bits) over all elements, modulo 2^64. Synchronises the host.

    Equal bits give equal checksums on every device and for every stride.

    Args:
        x: any strided tensor.
    """
    return int(checksum_on_device(x))


@torch.no_grad()
def checksum_on_device(x: Tensor) -> Tensor:
    """Compute `checksum` on the device of `x`, without waiting for it: int64 []."""
    x = torch.view_as_real(x) if x.is_complex() else x
    flat = x.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    whole = len(flat) // 8 * 8
    rest = torch.zeros(8, dtype=torch.uint8, device=x.device)  # the last bytes as a word
    rest[: len(flat) - whole] = flat[whole:]
    words = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    chunk = _CHUNK if x.device.type == "cpu" else _CHUNK_ON_GPU
    total = torch.full((), len(flat), dtype=torch.int64, device=x.device)
    start = 0
    for part in (*torch.split(words.view(torch.int64), chunk), rest.view(torch.int64)):
        if len(part):
            position = torch.arange(start, start + len(part), dtype=torch.int64, device=x.device)
            total += _mixed(position.mul_(_ODD[0]).add_(part)).sum()
            start += len(part)
    return total


@torch.no_grad()
def norm_and_projections(x: Tensor, projections: int) -> list[float]:
    """Return the norm of a tensor, and projections onto random signs, the same on all ranks.

    In a dry run, in which tensors have no values, they are 0.
    """
    flat = torch.view_as_real(x).flatten() if x.is_complex() else x.detach().flatten()
    flat = flat.double()
    generator = torch.Generator("cpu").manual_seed(flat.numel())
    sums = [flat.norm()]
    for _ in range(projections):
        signs = torch.randint(0, 2, flat.shape, generator=generator, dtype=torch.int8, device="cpu")
        sums.append(flat @ (signs.to(flat.device).double() * 2 - 1))
    stacked = torch.stack(sums)
    values: list[float] = [0.0] * len(sums) if is_fake(stacked) else stacked.tolist()
    return values


def digest_ints(value: object, count: int = 3) -> list[int]:
    """Return a hash of `repr(value)` as 64-bit integers, which ranks can exchange."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8 * count).digest()
    return [int.from_bytes(digest[i : i + 8], "big", signed=True) for i in range(0, len(digest), 8)]


def version_of(x: Tensor) -> int:
    """Return a tensor's version, which changes in place increase; 0 for inference tensors, which have none."""
    return 0 if x.is_inference() else x._version


def plain_tensors(name: str, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a weight with its name; of a quantised one, the plain tensors inside it."""
    if isinstance(x, DTensor) or not is_traceable_wrapper_subclass(x):
        yield name, x
        return
    for attribute in x.__tensor_flatten__()[0]:
        yield from plain_tensors(f"{name}.{attribute}", getattr(x, attribute))


def _mixed(x: Tensor) -> Tensor:
    """Mix the bits of each element in place (splitmix64 with arithmetic shifts; the arithmetic wraps)."""
    for shift, factor in ((30, _ODD[1]), (27, _ODD[2])):
        x ^= x >> shift
        x *= factor
    x ^= x >> 31
    return x
