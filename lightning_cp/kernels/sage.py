"""SageAttention, if installed: 8-bit attention for sampling. Not measured: it has not run on a GPU yet."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, NoReturn

from torch import Tensor

from lightning_cp.errors import KernelError
from lightning_cp.kernels.protocol import PartialAttention
from lightning_cp.kernels.torch_kernels import half_precision_refusal


class SageKernel:
    """Package `sageattention`: approximate (8-bit products) and without a gradient, so "auto" never chooses it.

    It subtracts the mean from the keys. Its LSE is a natural log and includes that mean again, so that chunks of a ring
    can be merged.
    """

    name = "sage"
    device_type = "cuda"
    native_gqa = False  # some releases cannot return the log-sum-exp of grouped heads

    def refusal(self, query: Tensor, mask: Tensor | None) -> str | None:
        if mask is not None:
            return "it does not support masks"
        if reason := half_precision_refusal(query, largest=128):
            return reason
        return None if importlib.util.find_spec("sageattention") else "the package sageattention is not installed"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, scale: float
    ) -> PartialAttention:
        attend = importlib.import_module("sageattention").sageattn
        q, k, v = (x.contiguous() for x in (query, key, value))
        out, lse = attend(q, k, v, tensor_layout="NHD", is_causal=causal, sm_scale=scale, return_lse=True)
        return PartialAttention(out, lse.transpose(1, 2))

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        raise KernelError("kernel='sage' has no gradient: use it for sampling only, under torch.no_grad()")
