"""PyTorch's flash attention for CPU, through aten: the kernel behind `F.scaled_dot_product_attention` there."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cp.kernels.protocol import Grads, Part

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CpuFlashKernel:
    """Blockwise, O(s) memory; masks, grouped-query heads and unequal lengths included.

    Measured on torch 2.13: exact (float64 error < 2e-15) given what `Kernel` promises; it dies on empty inputs and
    reports lse 0 for rows without a key, which is why those are handled by the caller.
    """

    name = "flash"
    device_type = "cpu"
    native_gqa = True

    def refusal(self, query: Tensor, mask: Tensor | None) -> str | None:
        return None if query.dtype in _DTYPES else f"dtype {query.dtype} is none of {_DTYPES}"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, scale: float
    ) -> Part:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), 0.0, causal, attn_mask=mask, scale=scale
        )
        return Part(out.transpose(1, 2), lse.transpose(1, 2))

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: Part,
        mask: Tensor | None,
        *,
        causal: bool,
        scale: float,
    ) -> Grads:
        tensors = (grad_out, query, key, value, part.out, part.lse)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(x.transpose(1, 2) for x in tensors), 0.0, causal, attn_mask=mask, scale=scale
        )
        return Grads(*(x.transpose(1, 2) for x in grads))
