"""cuDNN's fused attention, called through aten."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cp.compat.torch_names import aten
from lightning_cp.device_profile import compute_capability, is_assumed
from lightning_cp.kernels.cuda_flash import pad_heads
from lightning_cp.kernels.protocol import Grads, PartialAttention


class CudnnKernel:
    """Half-precision kernel for Ampere and later; most reports call it the fastest built-in kernel on Hopper."""

    name = "cudnn"
    device_type = "cuda"
    native_gqa = False

    def refusal(self, query: Tensor, mask: Tensor | None) -> str | None:
        if mask is not None:
            return "it is used only without a mask"
        if query.dtype not in (torch.float16, torch.bfloat16):
            return f"dtype {query.dtype} is neither float16 nor bfloat16"
        if query.shape[-1] > 128:
            return f"head size {query.shape[-1]} is above 128"
        if compute_capability(query) < (8, 0):
            return "it needs compute capability 8.0"
        available = is_assumed() or torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
        return None if available else "cuDNN is not available"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, scale: float
    ) -> PartialAttention:
        d = query.shape[-1]
        q, k, v = (pad_heads(x).transpose(1, 2) for x in (query, key, value))
        out, lse, *_ = aten("_scaled_dot_product_cudnn_attention")(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return PartialAttention(out[..., :d].transpose(1, 2), lse.reshape(q.shape[:3]).transpose(1, 2))

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
        # PyTorch keeps a compiled graph for the sizes of a call and the strides of q, k and v. The graph has also the
        # strides that out and its gradient had in the first call: other ones would be read from wrong addresses.
        grad_out, attended = grad_out.contiguous(), part.out.contiguous()
        g, q, k, v, out = (pad_heads(x).transpose(1, 2) for x in (grad_out, query, key, value, attended))
        lse = part.lse.transpose(1, 2).unsqueeze(-1).contiguous()
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
        grads = aten("_scaled_dot_product_cudnn_attention_backward")(
            g,
            q,
            k,
            v,
            out,
            lse,
            philox_seed=no_dropout,
            philox_offset=no_dropout,
            attn_bias=None,
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=q.shape[2],
            max_k=k.shape[2],
            dropout_p=0.0,
            is_causal=causal,
            scale=scale,
        )
        return Grads(*(x[..., :d].transpose(1, 2) for x in grads))
