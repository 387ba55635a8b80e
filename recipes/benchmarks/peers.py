"""Context parallelism of diffusers, called as documented, and a naive baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from typing_extensions import override

from lightning_cp.compat.check import check_private_uses
from lightning_cp.compat.torch_names import aten

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend_gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Naive baseline: gather all K and V, then attend to them. For even lengths only."""
    q, k, v = (x.transpose(1, 2) for x in (q, _gathered(k), _gathered(v)))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _gathered(x: Tensor) -> Tensor:
    gathered: Tensor = _Gathered.apply(x)  # type: ignore[no-untyped-call]
    return gathered


class _Gathered(torch.autograd.Function):
    @override
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @override
    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        parts = [part.contiguous() for part in torch.chunk(grads[0], dist.get_world_size(), 1)]
        local = torch.empty_like(parts[0])
        dist.reduce_scatter(local, parts)
        return local


def attentions(device: torch.device) -> dict[str, Callable[[], Attend]]:
    """Return functions by name that build the attention of local q, k, v [b, s, h, d]."""
    world = dist.get_world_size()
    kernel_note = " (kernel given)" if device.type == "cpu" else ""
    builders: dict[str, Callable[[], Attend]] = {
        "diffusers Ulysses": lambda: _unmodified(device, ring=1, ulysses=world),
        f"diffusers ring{kernel_note}": lambda: diffusers_attention(device, ring=world, ulysses=1),
    }
    if kernel_note:
        builders[f"diffusers Ulysses{kernel_note}"] = lambda: diffusers_attention(device, ring=1, ulysses=world)
    if world >= 4 and world % 2 == 0:
        builders[f"diffusers unified{kernel_note}"] = lambda: diffusers_attention(device, ring=2, ulysses=world // 2)
    return builders


def models(device: torch.device) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """Return by name functions that make a diffusers model parallel."""
    world = dist.get_world_size()
    builders = {
        "diffusers Ulysses": lambda model: _enable(model, device, ring=1, ulysses=world),
        "diffusers ring": lambda model: _enable(model, device, ring=world, ulysses=1),
    }
    if world >= 4 and world % 2 == 0:
        builders["diffusers unified"] = lambda model: _enable(model, device, ring=2, ulysses=world // 2)
    return builders


def diffusers_attention(device: torch.device, **settings: Any) -> Callable[..., Tensor]:
    """Return diffusers' context-parallel attention of local q, k, v [b, s, h, d] and a mask.

    diffusers has no ring kernel for CPU, so PyTorch's is used there; the rest of it runs unchanged.

    Args: settings: settings of diffusers' ContextParallelConfig; `ring` and `ulysses` are the degrees.
    """
    from lightning_cp.compat.diffusers_names import templated_context_parallel_attention

    if device.type != "cpu":
        return _unmodified(device, **settings)
    config = _diffusers_config(device, **settings)

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


def _unmodified(device: torch.device, **settings: Any) -> Attend:
    """Return diffusers' attention without changes; on CPU its backward repeats the forward."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    config = _diffusers_config(device, **settings)
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


def _enable(model: Any, device: torch.device, *, ring: int, ulysses: int) -> nn.Module:
    """Call `enable_parallelism`; on CPU, where it fails because there are no GPUs, do the same steps here."""
    from diffusers import ContextParallelConfig
    from diffusers.hooks import apply_context_parallel

    if device.type != "cpu":
        model.set_attention_backend("_native_cudnn")
        model.enable_parallelism(config=ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses))
        return model  # type: ignore[no-any-return]
    check_private_uses("benchmark")
    config = _diffusers_config(device, ring=ring, ulysses=ulysses)
    for module in model.modules():
        if hasattr(getattr(module, "processor", None), "_parallel_config"):
            module.processor._parallel_config = config
    apply_context_parallel(model, config.context_parallel_config, model._cp_plan)
    return model  # type: ignore[no-any-return]


def _diffusers_config(device: torch.device, *, ring: int, ulysses: int, **settings: Any) -> Any:
    from diffusers import ContextParallelConfig, ParallelConfig

    context = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, **settings)
    config = ParallelConfig(context_parallel_config=context)
    mesh = init_device_mesh(device.type, (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    config.setup(dist.get_rank(), dist.get_world_size(), device, mesh=mesh)
    return config
