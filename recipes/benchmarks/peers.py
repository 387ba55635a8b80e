"""Context parallelism of diffusers, called as documented, and a naive baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_cp.compat.check import check_private_uses
from lightning_cp.recipes.diffusers_attention import Attend, diffusers_attention, diffusers_config, unmodified_attention


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
        "diffusers Ulysses": lambda: unmodified_attention(device, ring=1, ulysses=world),
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


def _enable(model: Any, device: torch.device, *, ring: int, ulysses: int) -> nn.Module:
    """Call `enable_parallelism`; on CPU, where it fails because there are no GPUs, do the same steps here."""
    from diffusers import ContextParallelConfig
    from diffusers.hooks import apply_context_parallel

    if device.type != "cpu":
        model.set_attention_backend("_native_cudnn")
        model.enable_parallelism(config=ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses))
        return model  # type: ignore[no-any-return]
    check_private_uses("benchmark")
    config = diffusers_config(device, ring=ring, ulysses=ulysses)
    for module in model.modules():
        if hasattr(getattr(module, "processor", None), "_parallel_config"):
            module.processor._parallel_config = config
    apply_context_parallel(model, config.context_parallel_config, model._cp_plan)
    return model  # type: ignore[no-any-return]
