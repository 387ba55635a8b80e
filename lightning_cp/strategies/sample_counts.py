"""Count each sample once in sums, gathered tensors and metrics: all ranks of a context group hold the same samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.throughput import Throughput
from torch import Tensor
from torchmetrics import metric

from lightning_cp.comm.shards import gather_shards
from lightning_cp.mesh.groups import MeshGroups, as_ring, cached, first_ranks

_UNCHANGED = {dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.BAND, dist.ReduceOp.BOR}


def is_world(group: object) -> bool:
    """Return whether a `group` argument means all ranks: None, or the world's process group, which Fabric passes."""
    return dist.is_initialized() and group in (None, dist.group.WORLD)


def sum_once(total: Any, reduce_op: Any, groups: MeshGroups | None) -> Any:
    """Make a reduction over all ranks one over the data groups, in place.

    A sum is divided by the number of ranks in a context group. Means, minima and maxima are the same over all ranks and
    over the data groups.

    Args:
        total: result of the reduction over the world; a value that is no tensor was not reduced.
        reduce_op: the operation, as a `torch.distributed.ReduceOp` or its name; "mean" is "avg".
    Raises: ValueError: another operation, or a sum of integers that differ between the ranks of a context group.
    """
    if groups is None or groups.context_size == 1 or not isinstance(total, Tensor):
        return total
    op = _operation(reduce_op)
    if op in _UNCHANGED or total.dtype == torch.bool:  # a sum of booleans is "or"
        return total
    if op != dist.ReduceOp.SUM:
        raise ValueError(
            f"reduce_op={reduce_op!r} would count each sample {groups.context_size} times, because all ranks of a "
            "context group hold it: use 'mean', 'sum', 'min' or 'max', or reduce with torch.distributed"
        )
    is_integer = not (total.is_floating_point() or total.is_complex())
    if is_integer and (total % groups.context_size).any():
        raise ValueError(
            "a sum of integers over the data groups needs equal values on all ranks of a context group, and they "
            "differ: sum values of shards with torch.distributed"
        )
    # As the all-reduce does: no part of the gradient, and allowed for leaves and for inference tensors.
    with torch.inference_mode() if total.is_inference() else torch.no_grad():
        return total.floor_divide_(groups.context_size) if is_integer else total.div_(groups.context_size)


def _operation(reduce_op: Any) -> Any:
    if isinstance(reduce_op, str):
        name = reduce_op.upper()
        return getattr(dist.ReduceOp, "AVG" if name == "MEAN" else name, None)
    return next((op for op in (*_UNCHANGED, dist.ReduceOp.SUM) if reduce_op == op), reduce_op)


def gather_once(x: Tensor, groups: MeshGroups, *, differentiable: bool) -> Tensor:
    """All-gather a tensor of the same shape on all ranks, and keep those of the first rank of each context group.

    Returns: [data groups, *x.shape], in data-rank order.
    Ranks: the whole world. Gradient: reduce-scatter (sum) to the first ranks, if `differentiable`.
    """
    ranks = dist.get_world_size()
    world = cached(
        ("world", groups.name), lambda: as_ring(groups, dist.group.WORLD, ranks, dist.get_rank(), name="world")
    )
    gathered = gather_shards((x if differentiable else x.detach())[None], 0, [1] * ranks, world.name)
    return gathered[first_ranks(groups)]


def reduce_decision(decision: bool, *, every: bool, device: torch.device) -> bool:
    """Return whether all ranks of the world (`every`) or any of them decided for it."""
    if not dist.is_initialized():
        return decision
    decisions = torch.tensor(int(decision), device=device)
    dist.all_reduce(decisions, op=dist.ReduceOp.MIN if every else dist.ReduceOp.MAX)
    return bool(decisions)


def gather_metrics_once(groups: MeshGroups) -> None:
    """Make all torchmetrics of this process count each sample once, as long as this process group exists.

    A metric without `process_group` or `dist_sync_fn` gathers its states from all ranks of the world. This replaces the
    function that gathers them, because a metric need not belong to a module that the strategy knows.
    """
    module: Any = metric
    original = module.gather_all_tensors
    if isinstance(original, _GatherOnce):
        original = original.original
    module.gather_all_tensors = original if groups.context_size == 1 else _GatherOnce(original, groups)


class _GatherOnce:
    """Gather a tensor from the first rank of each context group, in data-rank order."""

    def __init__(self, original: Callable[..., list[Tensor]], groups: MeshGroups) -> None:
        self.original, self._groups, self._world = original, groups, dist.group.WORLD

    def __call__(self, result: Tensor, group: Any = None) -> list[Tensor]:
        gathered = self.original(result, group)
        if dist.group.WORLD is not self._world or not is_world(group):
            return gathered
        once = [gathered[rank] for rank in first_ranks(self._groups)]
        once[self._groups.data_rank] = result  # it may have a gradient
        return once


def measure_once(throughputs: Iterable[Throughput], groups: MeshGroups) -> None:
    """Make Lightning's throughput monitors multiply by the number of data groups, not of ranks.

    Their values per device are then values per context group, which has the peak FLOP/s of all its devices.
    """
    for one in throughputs:
        if one.world_size != groups.data_size:
            one.world_size = groups.data_size
            one.available_flops = one.available_flops and one.available_flops * groups.context_size
