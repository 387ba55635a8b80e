"""The memory of tensors."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch._C import _functorch as functorch

from tests.harness.strict.messages import StrictError

Bytes = npt.NDArray[np.uint8]


def memory(tensor: Tensor) -> Bytes:
    """Return the bytes of a dense tensor, as a view. No operator runs, so no mode sees it."""
    while functorch.is_functorch_wrapped_tensor(tensor):  # of torch.func.jvp
        tensor = functorch.get_unwrapped(tensor)
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
