"""PyTorch's flash attention for CUDA, called through aten."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp.compat.torch_names import aten
from lightning_cp.kernels.protocol import Grads, PartialAttention


class CudaFlashKernel:
    """Half-precision kernel without masks; head sizes up to 256 are padded to a multiple of 8."""

    name = "flash"
    device_type = "cuda"
    native_gqa = True

    def refusal(self, query: Tensor, mask: Tensor | None) -> str | None:
        if mask is not None:
            return "it does not support masks"
        if query.dtype not in (torch.float16, torch.bfloat16):
            return f"dtype {query.dtype} is neither float16 nor bfloat16"
        return None if query.shape[-1] <= 256 else f"head size {query.shape[-1]} is above 256"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, scale: float
    ) -> PartialAttention:
        d = query.shape[-1]
        q, k, v = (pad_heads(x) for x in (query, key, value))
        out, lse, *_ = aten("_flash_attention_forward")(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale
        )
        return PartialAttention(out[..., :d], lse.transpose(1, 2))

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
        d = query.shape[-1]
        g, q, k, v, out = (pad_heads(x) for x in (grad_out, query, key, value, part.out))
        lse = part.lse.transpose(1, 2).contiguous()
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grads = aten("_flash_attention_backward")(
            g,
            q,
            k,
            v,
            out,
            lse,
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=q.shape[1],
            max_k=k.shape[1],
            dropout_p=0.0,
            is_causal=causal,
            rng_state=no_dropout,
            unused=no_dropout.new_empty(0),
            scale=scale,
        )
        return Grads(*(x[..., :d] for x in grads))


def pad_heads(x: Tensor) -> Tensor:
    """Pad the last dim with zeros to a multiple of 8; attention with an explicit scale is unchanged."""
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x
