"""Kernels of the packages flash-attn 2, 3 and 4, if installed. Not measured: they have not run on a GPU yet."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_cp.device_profile import compute_capability, is_assumed
from lightning_cp.kernels.cuda_flash import pad_heads
from lightning_cp.kernels.protocol import Grads, PartialAttention


class FlashAttnKernel:
    """flash-attn 2 (`flash_attn`): half precision, without masks."""

    name = "flash_attn"
    device_type = "cuda"
    native_gqa = True
    package = "flash_attn"
    interface = "flash_attn.flash_attn_interface"

    def refusal(self, query: Tensor, mask: Tensor | None) -> str | None:
        if mask is not None:
            return "it does not support masks"
        if query.dtype not in (torch.float16, torch.bfloat16):
            return f"dtype {query.dtype} is neither float16 nor bfloat16"
        if query.shape[-1] > 256:
            return f"head size {query.shape[-1]} is above 256"
        if is_assumed():
            return "a dry run cannot call its functions"
        return None if is_installed(self.package) else f"the package {self.package} is not installed"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, scale: float
    ) -> PartialAttention:
        d = query.shape[-1]
        q, k, v = (pad_heads(x) for x in (query, key, value))  # the packages take any strides, the last one being 1
        out, lse = self._forward(q, k, v, causal=causal, scale=scale)
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
        grads = Grads(*(x.new_empty(x.shape) for x in (q, k, v)))
        self._backward(
            g, q, k, v, PartialAttention(out, part.lse.transpose(1, 2).contiguous()), grads, causal=causal, scale=scale
        )
        return Grads(*(x[..., :d] for x in grads))

    def _module(self) -> ModuleType:
        return importlib.import_module(self.interface)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._module()._flash_attn_forward(
            q,
            k,
            v,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
        )
        return out, lse

    def _backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        part: PartialAttention,
        grads: Grads,
        *,
        causal: bool,
        scale: float,
    ) -> None:
        self._module()._flash_attn_backward(
            g,
            q,
            k,
            v,
            part.out,
            part.lse,
            *grads,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=False,
        )


class FlashAttn3Kernel(FlashAttnKernel):
    """flash-attn 3 (`flash_attn_interface`), for Hopper."""

    name = "flash_attn_3"
    package = "flash_attn_interface"
    interface = "flash_attn_interface"

    def refusal(self, query: Tensor, mask: Tensor | None) -> str | None:
        reason = super().refusal(query, mask)
        if reason is None and compute_capability(query)[0] != 9:
            return "it needs compute capability 9.x"
        return reason

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._module()._flash_attn_forward(q, k, v, softmax_scale=scale, causal=causal)
        return out, lse

    def _backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        part: PartialAttention,
        grads: Grads,
        *,
        causal: bool,
        scale: float,
    ) -> None:
        backward = self._module()._flash_attn_backward
        # The name of this argument differs between releases.
        name = "is_causal" if "is_causal" in inspect.signature(backward).parameters else "causal"
        options: dict[str, Any] = {**dict(zip(("dq", "dk", "dv"), grads, strict=True)), name: causal}
        backward(g, q, k, v, part.out, part.lse, softmax_scale=scale, **options)


class FlashAttn4Kernel(FlashAttnKernel):
    """flash-attn 4 (`flash_attn.cute`), for Hopper and Blackwell."""

    name = "flash_attn_4"
    package = "flash_attn.cute"
    interface = "flash_attn.cute.interface"

    def refusal(self, query: Tensor, mask: Tensor | None) -> str | None:
        reason = super().refusal(query, mask)
        if reason is not None:
            return reason
        if query.shape[-1] > 128:
            return f"head size {query.shape[-1]} is above 128"
        if compute_capability(query)[0] not in (9, 10, 11):
            return "it needs compute capability 9.x, 10.x or 11.x"
        return None

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._module()._flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)
        return out, lse

    def _backward(
        self,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        part: PartialAttention,
        grads: Grads,
        *,
        causal: bool,
        scale: float,
    ) -> None:
        gradients = self._module()._flash_attn_bwd(q, k, v, part.out, g, part.lse, softmax_scale=scale, causal=causal)
        for grad, result in zip(grads, gradients[:3], strict=True):
            grad.copy_(result)


def is_installed(package: str) -> bool:
    """Return True if a package or subpackage (`flash_attn.cute`) is installed. Imports only its parent packages."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False
