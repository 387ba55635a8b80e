"""PyTorch's own attention kernels, called through aten (flash on CUDA and CPU, cuDNN, efficient)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp.compat.torch_names import aten
from lightning_cp.device_profile import compute_capability, is_assumed
from lightning_cp.kernels.protocol import Grads, Inputs, PartialAttention

_LSE_ALIGNMENT = 32  # in queries: the kernel pads lse to it, and expects it padded
_BIAS_ALIGNMENT = 8  # in keys: width of the kernel's loads of the bias
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CudaFlashKernel:
    """Half-precision kernel without masks; head sizes up to 256 are padded to a multiple of 8."""

    name = "flash"
    device_type = "cuda"
    native_gqa = True

    def refusal(self, query: Tensor, mask: Tensor | None) -> str | None:
        if mask is not None:
            return "it does not support masks"
        return half_precision_refusal(query, largest=256)

    def forward(self, inputs: Inputs, mask: Tensor | None, *, causal: bool, scale: float) -> PartialAttention:
        d = inputs.query.shape[-1]
        q, k, v = map(pad_heads, inputs)
        out, lse, *_ = aten("_flash_attention_forward")(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )
        return PartialAttention(out[..., :d], lse.transpose(1, 2))

    def backward(
        self, grad: Tensor, inputs: Inputs, part: PartialAttention, mask: Tensor | None, *, causal: bool, scale: float
    ) -> Grads:
        d = grad.shape[-1]
        g, q, k, v, out = map(pad_heads, (grad, *inputs, part.out))
        lse = part.lse.transpose(1, 2).contiguous()
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        lengths, unused = (None, None, q.shape[1], k.shape[1]), no_dropout.new_empty(0)
        grads = aten("_flash_attention_backward")(
            g, q, k, v, out, lse, *lengths, 0.0, causal, rng_state=no_dropout, unused=unused, scale=scale
        )
        return Grads(*(x[..., :d] for x in grads))


def half_precision_refusal(query: Tensor, *, largest: int) -> str | None:
    """Return why a kernel of half precision does not take a query; None if it does. Args: largest: head size."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {query.dtype} is neither float16 nor bfloat16"
    return None if query.shape[-1] <= largest else f"head size {query.shape[-1]} is above {largest}"


def pad_heads(x: Tensor) -> Tensor:
    """Pad the last dim with zeros to a multiple of 8; attention with an explicit scale is unchanged."""
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x


class CudnnKernel:
    """Half-precision kernel for Ampere and later; most reports call it the fastest built-in kernel on Hopper."""

    name = "cudnn"
    device_type = "cuda"
    native_gqa = False

    def refusal(self, query: Tensor, mask: Tensor | None) -> str | None:
        if mask is not None:
            return "it is used only without a mask"
        if reason := half_precision_refusal(query, largest=128):
            return reason
        if compute_capability(query) < (8, 0):
            return "it needs compute capability 8.0"
        available = is_assumed() or torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
        return None if available else "cuDNN is not available"

    def forward(self, inputs: Inputs, mask: Tensor | None, *, causal: bool, scale: float) -> PartialAttention:
        d = inputs.query.shape[-1]
        q, k, v = (pad_heads(x).transpose(1, 2) for x in inputs)
        out, lse, *_ = aten("_scaled_dot_product_cudnn_attention")(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return PartialAttention(out[..., :d].transpose(1, 2), lse.reshape(q.shape[:3]).transpose(1, 2))

    def backward(
        self, grad: Tensor, inputs: Inputs, part: PartialAttention, mask: Tensor | None, *, causal: bool, scale: float
    ) -> Grads:
        d = grad.shape[-1]
        # PyTorch keeps a compiled graph for the sizes of a call and the strides of q, k and v. The graph has also the
        # strides that out and its gradient had in the first call: other ones would be read from wrong addresses.
        grad, attended = grad.contiguous(), part.out.contiguous()
        g, q, k, v, out = (pad_heads(x).transpose(1, 2) for x in (grad, *inputs, attended))
        lse = part.lse.transpose(1, 2).unsqueeze(-1).contiguous()
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
        lengths = (None, None, q.shape[2], k.shape[2])
        grads = aten("_scaled_dot_product_cudnn_attention_backward")(
            g, q, k, v, out, lse, no_dropout, no_dropout, None, *lengths, 0.0, causal, scale=scale
        )
        return Grads(*(x[..., :d].transpose(1, 2) for x in grads))


class EfficientKernel:
    """Kernel for float32 and half precision, with masks; the only built-in CUDA kernel that supports both."""

    name = "efficient"
    device_type = "cuda"
    native_gqa = False

    def refusal(self, query: Tensor, mask: Tensor | None) -> str | None:
        dtypes = (torch.float32, torch.float16, torch.bfloat16)
        return None if query.dtype in dtypes else f"dtype {query.dtype} is not one of {dtypes}"

    def forward(self, inputs: Inputs, mask: Tensor | None, *, causal: bool, scale: float) -> PartialAttention:
        d, sq = inputs.query.shape[-1], inputs.query.shape[1]
        q, k, v = (pad_heads(x).transpose(1, 2) for x in inputs)
        out, lse, *_ = aten("_scaled_dot_product_efficient_attention")(
            q, k, v, _bias(mask, q, k), True, 0.0, causal, scale=scale
        )
        return PartialAttention(out[..., :d].transpose(1, 2), lse[..., :sq].transpose(1, 2))

    def backward(
        self, grad: Tensor, inputs: Inputs, part: PartialAttention, mask: Tensor | None, *, causal: bool, scale: float
    ) -> Grads:
        d, sq = grad.shape[-1], grad.shape[1]
        g, q, k, v = (pad_heads(x).transpose(1, 2) for x in (grad, *inputs))
        # The kernel assumes, unchecked, a row stride of heads * d for `out`, and needs aligned rows of lse.
        out = pad_heads(part.out).contiguous().transpose(1, 2)
        lse = F.pad(part.lse.transpose(1, 2), (0, -sq % _LSE_ALIGNMENT), value=float("inf")).contiguous()
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
        bias, needed = _bias(mask, q, k), [True, True, True, False]
        grads = aten("_scaled_dot_product_efficient_attention_backward")(
            g, q, k, v, bias, out, lse, no_dropout, no_dropout, 0.0, needed, causal, scale=scale
        )
        return Grads(*(x[..., :d].transpose(1, 2) for x in grads[:3]))


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Convert a mask to the bias that the kernel loads: q's dtype, aligned rows, expanded over batch and heads."""
    if mask is None:
        return None
    sk = k.shape[2]
    padded = F.pad(mask.to(q.dtype), (0, -sk % _BIAS_ALIGNMENT))
    return padded[..., :sk].expand(q.shape[0], q.shape[1], q.shape[2], sk)


class CpuFlashKernel:
    """Blockwise kernel with O(s) memory; supports masks, GQA and unequal lengths of query and key.

    Measured on torch 2.13: exact (float64 error < 2e-15) under the conditions of `Kernel`. It crashes on empty inputs
    and returns lse 0 for queries without a key; `local.attend` handles both.
    """

    name = "flash"
    device_type = "cpu"
    native_gqa = True

    def refusal(self, query: Tensor, mask: Tensor | None) -> str | None:
        return None if query.dtype in _DTYPES else f"dtype {query.dtype} is not one of {_DTYPES}"

    def forward(self, inputs: Inputs, mask: Tensor | None, *, causal: bool, scale: float) -> PartialAttention:
        out, lse = aten("_scaled_dot_product_flash_attention_for_cpu")(
            inputs.query.transpose(1, 2), *map(_by_head, inputs[1:]), 0.0, causal, attn_mask=mask, scale=scale
        )
        return PartialAttention(out.transpose(1, 2), lse.transpose(1, 2))

    def backward(
        self, grad: Tensor, inputs: Inputs, part: PartialAttention, mask: Tensor | None, *, causal: bool, scale: float
    ) -> Grads:
        g, q, out, lse = (x.transpose(1, 2) for x in (grad, inputs.query, *part))
        grads = aten("_scaled_dot_product_flash_attention_for_cpu_backward")(
            g, q, *map(_by_head, inputs[1:]), out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
        return Grads(*(x.transpose(1, 2) for x in grads))


def _by_head(x: Tensor) -> Tensor:
    """Transpose [b, s, h, d] -> [b, h, s, d]; copy if the tokens of a head are far apart in memory, for cache locality.

    Measured on K and V of 8 heads x 64: with tokens 2 kB apart the copy makes forward 1/10 and backward 1/20 faster.
    With tokens 4 kB apart, both are 1/3 faster.
    """
    heads = x.transpose(1, 2)
    return heads if heads.stride(2) <= 2 * heads.shape[3] else heads.contiguous()
