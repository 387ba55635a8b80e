"""Gradients that a step computes without a backward: those of one process, on every rank (`strategy.grad`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.compat.distributed_names import gathered_weights
from lightning_cp.compat.fabric_names import as_fabric_backward
from lightning_cp.engine.attention.stand_ins import inputs_of, original_of, weight_of


def mean_grad(
    outputs: Any, inputs: Any, units: Sequence[FSDPModule], context: dist.ProcessGroup | None, **settings: Any
) -> Any:
    """Compute `torch.autograd.grad`, and its mean over ranks: all for weights, those of `context` for other tensors.

    Args:
        units: sharded modules that hold weights among the inputs.
        context: ranks that share a sample; None: only this one.
        settings: further arguments of `torch.autograd.grad`. A tensor that some ranks use counts as used.
    Returns: as `torch.autograd.grad`; gradients of sharded weights are whole.
    Ranks: the whole world. Gradient: the same mean over ranks, the adjoint.
    Raises: RuntimeError: a tensor is not used on any rank, and allow_unused is not set.
    """
    allow_unused = settings.pop("allow_unused", None) or settings.get("materialize_grads", False)
    names, wanted = list(inputs) if isinstance(inputs, Mapping) else None, inputs_of(inputs)
    gathered = {id(shard): weight for unit in units for shard, weight in gathered_weights(unit)}
    in_graph: list[Any] = [gathered.get(id(x), x) for x in wanted]
    with as_fabric_backward():
        grads = list(original_of(torch.autograd.grad)(outputs, in_graph, allow_unused=True, **settings))
    for group, is_weight in ((dist.group.WORLD, True), (context, False)):
        chosen = [i for i, x in enumerate(wanted) if (weight_of(x) is not None) is is_weight]
        if not chosen:
            continue
        flags = [int(grads[i] is not None) for i in chosen]
        by_rank = [flags] if group is None or group.size() == 1 else all_gather_ints(flags, group=group)
        used = [any(of_ranks) for of_ranks in zip(*by_rank, strict=True)]
        if not allow_unused and not all(used):
            raise RuntimeError(
                f"input {chosen[used.index(False)]} of strategy.grad is not used by the outputs, on any rank: leave it "
                "out, or set allow_unused=True"
            )
        chosen = [i for i, is_used in zip(chosen, used, strict=True) if is_used]
        if len(by_rank) == 1:
            continue
        values = [torch.zeros_like(in_graph[i]) if grads[i] is None else grads[i] for i in chosen]
        for i, mean in zip(chosen, _Mean.apply(group, *values), strict=True):  # type: ignore[no-untyped-call]
            grads[i] = mean
    for i, x in enumerate(wanted):
        if grads[i] is not None and isinstance(x, Tensor):
            grads[i] = grads[i].to(x.dtype)  # FSDP2 may gather weights in a lower precision
    return tuple(grads) if names is None else dict(zip(names, grads, strict=True))


class _Mean(torch.autograd.Function):
    """Mean of tensors over the ranks of a group, summed in float32 or wider. Backward: the same."""

    @staticmethod
    @override
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        totals = [x.to(torch.promote_types(x.dtype, torch.float32), copy=True).contiguous() for x in tensors]
        for work in [dist.all_reduce(total, group=group, async_op=True) for total in totals]:
            work.wait()
        return tuple((total / group.size()).to(x.dtype) for x, total in zip(tensors, totals, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_Mean.apply(ctx.group, *grads)  # type: ignore[no-untyped-call]


def sharded_units(modules: Sequence[nn.Module]) -> list[FSDPModule]:
    """Return the sharded modules in `modules`."""
    return [inner for module in modules for inner in module.modules() if isinstance(inner, FSDPModule)]


def shards_of(module: nn.Module) -> dict[int, nn.Parameter]:
    """Return the sharded weights by the id of the gathered one, which may stand in its place."""
    return {id(whole): shard for unit in sharded_units([module]) for shard, whole in gathered_weights(unit)}
