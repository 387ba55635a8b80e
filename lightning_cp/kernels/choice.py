"""Choose the kernel: by name, or the first that supports device, dtype, head size and mask."""

from __future__ import annotations

from torch import Tensor

from lightning_cp.config import KERNEL_NAMES
from lightning_cp.device_profile import device_type
from lightning_cp.errors import KernelError
from lightning_cp.kernels.math import MathKernel
from lightning_cp.kernels.protocol import Kernel, TangentKernel
from lightning_cp.kernels.torch_kernels import CpuFlashKernel, CudaFlashKernel, CudnnKernel, EfficientKernel

# In order of preference. "flash" is PyTorch's built-in flash attention, on CPU and on CUDA.
KERNELS: tuple[Kernel, ...] = (CpuFlashKernel(), CudnnKernel(), CudaFlashKernel(), EfficientKernel(), MathKernel())
# Kernels with a forward derivative, in order of preference.
TANGENT_KERNELS: tuple[TangentKernel, ...] = (MathKernel(),)

# diffusers backend name -> kernel name, for backends with a kernel here.
DIFFUSERS_BACKENDS: dict[str, str] = {
    "native": "auto",
    "_native_flash": "flash",
    "_native_cudnn": "cudnn",
    "_native_efficient": "efficient",
    "_native_math": "math",
    "flash": "flash",  # of the package flash-attn; PyTorch's is the same algorithm
    "flex": "auto",  # with a block mask
}


def check_kernel(name: object) -> str:
    """Return `name` if it is a kernel name. Raises: KernelError (a ValueError) with the list of names."""
    if name not in KERNEL_NAMES:
        raise KernelError(f"kernel={name!r} must be one of {', '.join(KERNEL_NAMES)}")
    return str(name)


def kernel_of_backend(backend: str) -> str:
    """Return the kernel name for a diffusers backend. Raises: KernelError with the list of supported backends."""
    if backend not in DIFFUSERS_BACKENDS:
        raise KernelError(
            f"attention backend {backend!r} does not return the log-sum-exp and gradients that context parallelism "
            f"needs: use one of {', '.join(DIFFUSERS_BACKENDS)} (set_attention_backend, attention_backend() or "
            "DIFFUSERS_ATTN_BACKEND)"
        )
    return DIFFUSERS_BACKENDS[backend]


def choose_kernel(name: str, query: Tensor, mask: Tensor | None) -> Kernel:
    """Return the kernel `name`, or with "auto" the first kernel that supports these tensors.

    Raises: KernelError: the name is unknown, or the kernel does not support the device, dtype, head size or mask.
    """
    check_kernel(name)
    reasons = []
    for kernel in KERNELS:
        if name not in ("auto", kernel.name):
            continue
        if kernel.device_type not in ("any", device_type(query)):
            reasons.append(f"it runs on {kernel.device_type}, not {device_type(query)}")
            continue
        reason = kernel.refusal(query, mask)
        if reason is None:
            return kernel
        reasons.append(reason)
    raise KernelError(f"kernel={name!r} cannot be used here: {'; '.join(reasons)}. Use kernel='auto'")


def choose_tangent_kernel(name: str) -> TangentKernel:
    """Return the kernel for forward derivatives of calls with the kernel setting `name`.

    Raises: KernelError: the kernel `name` has no forward derivative.
    """
    for kernel in TANGENT_KERNELS:
        if name in ("auto", kernel.name):
            return kernel
    names = ", ".join(repr(kernel.name) for kernel in TANGENT_KERNELS)
    raise KernelError(
        f"kernel={name!r} has no forward derivative (torch.func.jvp, torch.autograd.forward_ad): use kernel='auto' or "
        f"{names}"
    )
