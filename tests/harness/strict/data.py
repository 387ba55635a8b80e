"""The memory and bytes of tensors, and reductions of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _functorch as functorch

from tests.harness.strict.messages import StrictError

Bytes = npt.NDArray[np.uint8]
_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def _unwrapped(tensor: Tensor) -> Tensor:
    while functorch.is_functorch_wrapped_tensor(tensor):  # of torch.func.jvp
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    return _unwrapped(tensor).untyped_storage()


def is_ours_alone(storage: torch.UntypedStorage) -> bool:
    """Return True if no tensor has this storage any more."""
    return int(torch._C._storage_Use_Count(storage._cdata)) == 1


def memory(tensor: Tensor) -> Bytes:
    """Return the bytes of a dense tensor, as a view. No operator runs, so no mode sees it."""
    tensor = _unwrapped(tensor)
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if tensor.numel() and span != tensor.numel():
        raise StrictError(f"a tensor of shape {list(tensor.shape)} with strides {tensor.stride()} is not dense")
    size = tensor.numel() * tensor.element_size()
    if not size:
        return np.empty(0, np.uint8)
    return np.frombuffer((ctypes.c_uint8 * size).from_address(tensor.data_ptr()), np.uint8)


def overlap(a: Bytes, b: Bytes) -> bool:
    start, other = a.ctypes.data, b.ctypes.data
    return bool(a.size and b.size and start < other + b.size and other < start + a.size)


def form(tensors: Sequence[Tensor]) -> str:
    return " ".join(f"{x.numel()} x {x.dtype}" for x in tensors)


def name_of(op: Any) -> str:
    return next(name for name in _REDUCTIONS if op == getattr(dist.ReduceOp, name))


def bytes_of(tensors: Sequence[Tensor]) -> bytes:
    return b"".join(memory(x).tobytes() for x in tensors)


def place(tensors: Sequence[Tensor], index: int) -> tuple[int, int]:
    """Return where the bytes of a tensor are in those of all."""
    sizes = [x.numel() * x.element_size() for x in tensors]
    return sum(sizes[:index]), sum(sizes[: index + 1])


def check_sizes(tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
    if [x.numel() for x in tensors] != list(sizes):
        raise StrictError(f"buffers of {[x.numel() for x in tensors]} elements, expected {list(sizes)}")


def write(tensors: Sequence[Tensor], data: bytes | None) -> None:
    size = sum(x.numel() * x.element_size() for x in tensors)
    if data is None or len(data) != size:
        raise StrictError(f"received {None if data is None else len(data)} bytes into buffers of {size}")
    for i, x in enumerate(tensors):
        start, stop = place(tensors, i)
        memory(x)[:] = np.frombuffer(data[start:stop], np.uint8)


def write_each(tensors: Sequence[Tensor], data: Sequence[bytes | None]) -> None:
    for x, part in zip(tensors, data, strict=True):
        write([x], part)


def reduced(data: Sequence[bytes | None], like: Sequence[Tensor], op: Any) -> bytes:
    """Reduce the bytes of all members, in rank order, so that all have the same result."""
    combine, found = _REDUCTIONS[name_of(op)], []
    with torch.no_grad():
        for i, x in enumerate(like):
            start, stop = place(like, i)
            if start == stop:
                continue
            parts = [torch.frombuffer(bytearray(part[start:stop]), dtype=x.dtype) for part in data if part is not None]
            total = parts[0]
            for part in parts[1:]:
                total = combine(total, part)
            found.append((total / len(parts)).to(x.dtype) if name_of(op) == "AVG" else total)
        return bytes_of(found)
