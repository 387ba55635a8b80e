"""Attention over one (q, k, v) on one device: kernels with one protocol, and the choice of a kernel."""

from lightning_cp.config import KERNEL_NAMES
from lightning_cp.kernels.choice import check_kernel, choose_kernel, choose_tangent_kernel, kernel_of_backend
from lightning_cp.kernels.local import accumulation_dtype_of, attend, attend_backward, attend_tangents
from lightning_cp.kernels.protocol import Grads, Inputs, Kernel, PartialAttention, PartialAttentionGrad

__all__ = [
    "KERNEL_NAMES",
    "Grads",
    "Inputs",
    "Kernel",
    "PartialAttention",
    "PartialAttentionGrad",
    "accumulation_dtype_of",
    "attend",
    "attend_backward",
    "attend_tangents",
    "check_kernel",
    "choose_kernel",
    "choose_tangent_kernel",
    "kernel_of_backend",
]
