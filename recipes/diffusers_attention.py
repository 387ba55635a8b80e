"""diffusers' context-parallel attention: `compare.py` shows where it is exact, and the benchmarks how fast it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_cp.compat.torch_names import aten

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def diffusers_attention(device: torch.device, **settings: Any) -> Callable[..., Tensor]:
    """Return diffusers' context-parallel attention of local q, k, v [b, s, h, d] and a mask.

    diffusers has no ring kernel for CPU, so PyTorch's is used there; the rest of it runs unchanged.

    Args: settings: settings of diffusers' ContextParallelConfig; `ring` and `ulysses` are the degrees.
    """
    from lightning_cp.compat.diffusers_names import templated_context_parallel_attention

    if device.type != "cpu":
        return unmodified_attention(device, **settings)
    config = diffusers_config(device, **settings)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False, enable_gqa: bool = False
    ) -> Tensor:
        return templated_context_parallel_attention(  # type: ignore[no-any-return]
            q,
            k,
            v,
            mask,
            0.0,
            is_causal,
            None,
            enable_gqa,
            False,
            forward_op=_cpu_forward,
            backward_op=_cpu_backward,
            _parallel_config=config,
        )

    return attend


def unmodified_attention(device: torch.device, **settings: Any) -> Attend:
    """Return diffusers' attention without changes; on CPU its backward repeats the forward."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    config = diffusers_config(device, **settings)
    backend = "native" if device.type == "cpu" else "_native_cudnn"

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = dispatch_attention_fn(q, k, v, backend=backend, parallel_config=config)
        return out

    return attend


def _cpu_forward(
    ctx: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
    lse: bool,
    **more: Any,
) -> Any:
    """Compute attention for diffusers' templates: out [b, s, h, d] and, if `lse`, also lse [b, s, h]."""
    bias = None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    out, log_sum = aten("_scaled_dot_product_flash_attention_for_cpu")(
        *(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal, attn_mask=bias
    )
    out, log_sum = out.transpose(1, 2), log_sum.transpose(1, 2)
    if more["_save_ctx"]:
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.bias = bias
    return (out, log_sum) if lse else out


def _cpu_backward(ctx: Any, grad_out: Tensor, *_: Any, **other: Any) -> tuple[Tensor, ...]:
    names = ("query", "key", "value", "out", "lse")
    q, k, v, out, lse = (other.get(name, saved) for name, saved in zip(names, ctx.saved_tensors, strict=True))
    grads = aten("_scaled_dot_product_flash_attention_for_cpu_backward")(
        *(x.transpose(1, 2).contiguous() for x in (grad_out, q, k, v, out, lse)), 0.0, False, attn_mask=ctx.bias
    )
    return tuple(x.transpose(1, 2) for x in grads)


def diffusers_config(device: torch.device, *, ring: int, ulysses: int, **settings: Any) -> Any:
    """Return diffusers' `ParallelConfig` with its meshes, for the whole world."""
    from diffusers import ContextParallelConfig, ParallelConfig

    context = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, **settings)
    config = ParallelConfig(context_parallel_config=context)
    mesh = init_device_mesh(device.type, (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    config.setup(dist.get_rank(), dist.get_world_size(), device, mesh=mesh)
    return config
