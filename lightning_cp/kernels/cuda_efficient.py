"""Memory-efficient attention for CUDA, called through aten."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp.compat.torch_names import aten
from lightning_cp.kernels.cuda_flash import pad_heads
from lightning_cp.kernels.protocol import Grads, PartialAttention

_LSE_ALIGNMENT = 32  # in queries: the kernel pads lse to it, and expects it padded
_BIAS_ALIGNMENT = 8  # in keys: width of the kernel's loads of the bias


class EfficientKernel:
    """Kernel for float32 and half precision, with masks; the only built-in CUDA kernel that supports both."""

    name = "efficient"
    device_type = "cuda"
    native_gqa = False

    def refusal(self, query: Tensor, mask: Tensor | None) -> str | None:
        dtypes = (torch.float32, torch.float16, torch.bfloat16)
        return None if query.dtype in dtypes else f"dtype {query.dtype} is not one of {dtypes}"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, scale: float
    ) -> PartialAttention:
        d, sq = query.shape[-1], query.shape[1]
        q, k, v = (pad_heads(x).transpose(1, 2) for x in (query, key, value))
        out, lse, *_ = aten("_scaled_dot_product_efficient_attention")(
            q, k, v, _bias(mask, q, k), True, 0.0, causal, scale=scale
        )
        return PartialAttention(out[..., :d].transpose(1, 2), lse[..., :sq].transpose(1, 2))

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: PartialAttention,
        mask: Tensor | None,
        *,
        causal: bool,
        scale: float,
    ) -> Grads:
        d, sq = query.shape[-1], query.shape[1]
        g, q, k, v = (pad_heads(x).transpose(1, 2) for x in (grad_out, query, key, value))
        # The kernel assumes, unchecked, a row stride of heads * d for `out`, and needs aligned rows of lse.
        out = pad_heads(part.out).contiguous().transpose(1, 2)
        lse = F.pad(part.lse.transpose(1, 2), (0, -sq % _LSE_ALIGNMENT), value=float("inf")).contiguous()
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
        grads = aten("_scaled_dot_product_efficient_attention_backward")(
            g,
            q,
            k,
            v,
            attn_bias=_bias(mask, q, k),
            out=out,
            logsumexp=lse,
            philox_seed=no_dropout,
            philox_offset=no_dropout,
            dropout_p=0.0,
            grad_input_mask=[True, True, True, False],
            is_causal=causal,
            scale=scale,
        )
        return Grads(*(x[..., :d].transpose(1, 2) for x in grads[:3]))


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Convert a mask to the bias that the kernel loads: q's dtype, aligned rows, expanded over batch and heads."""
    if mask is None:
        return None
    sk = k.shape[2]
    padded = F.pad(mask.to(q.dtype), (0, -sk % _BIAS_ALIGNMENT))
    return padded[..., :sk].expand(q.shape[0], q.shape[1], q.shape[2], sk)
