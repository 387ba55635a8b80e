"""Shard sizes, and all-gather of sharded tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cp.comm.packet import Piece, pack, piece_of, unpack
from lightning_cp.comm.packets import all_gather_tensors
from lightning_cp.comm.transfer import all_gather_ints, exchange
from lightning_cp.comm.transforms import call_linear, register_adjoint
from lightning_cp.mesh import MeshGroups, groups_by_name


def shard_sizes(length: int, ranks: int) -> tuple[int, ...]:
    """Return the number of tokens on each rank: `length // ranks`, and one more on the first `length % ranks` ranks."""
    return tuple(length // ranks + (rank < length % ranks) for rank in range(ranks))


def shard_range(length: int, ranks: int, rank: int) -> range:
    """Return the global positions of one rank's tokens, for the sizes of `shard_sizes`."""
    sizes = shard_sizes(length, ranks)
    start = sum(sizes[:rank])
    return range(start, start + sizes[rank])


@torch.library.custom_op("lightning_cp::gather", mutates_args=())
def gather_operator(x: Tensor, dim: int, sizes: list[int], groups: str) -> Tensor:
    """Custom operator of `gather`, without a forward derivative."""
    group = groups_by_name(groups)
    if group.context is None:
        return x.clone(memory_format=torch.contiguous_format)
    segments = _by_rank(sizes, group.context_size)
    pieces = [piece_of(x, dim, sum(lengths)) for lengths in segments]
    received = all_gather_tensors([x], [[piece] for piece in pieces], device=x.device, group=group.context)
    parts = [part for (part,) in received]
    split = [torch.split(part, lengths, dim) for part, lengths in zip(parts, segments, strict=True)]
    return torch.cat([piece for segment in zip(*split, strict=True) for piece in segment], dim)


@gather_operator.register_fake
def _(x: Tensor, dim: int, sizes: list[int], groups: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    return x.new_empty(shape)


@torch.library.custom_op("lightning_cp::scatter_sum", mutates_args=())
def scatter_sum(x: Tensor, dim: int, sizes: list[int], groups: str) -> Tensor:
    """Reduce-scatter (sum) of `x`: the adjoint of `gather_operator`, same arguments.

    Ranks: all of the context group. The sum is computed in float32 or wider.
    """
    group = groups_by_name(groups)
    if group.context is None:
        return x.clone(memory_format=torch.contiguous_format)
    segments = _by_rank(sizes, group.context_size)
    pieces = iter(torch.split(x, sizes, dim))
    by_segment = [[next(pieces) for _ in segments] for _ in segments[0]]
    shards = [torch.cat(parts, dim) for parts in zip(*by_segment, strict=True)]
    total = shards[group.context_rank].to(torch.promote_types(x.dtype, torch.float32))
    others = [rank for rank in range(group.context_size) if rank != group.context_rank]
    received = [(rank, torch.empty_like(pack([shards[group.context_rank]]))) for rank in others]
    exchange([(rank, pack([shards[rank]])) for rank in others], received, group=group.context).wait()
    for _, buffer in received:
        total = total + unpack(buffer, [Piece(tuple(total.shape), x.dtype)])[0]
    return total.to(x.dtype, copy=True, memory_format=torch.contiguous_format)


@scatter_sum.register_fake
def _(x: Tensor, dim: int, sizes: list[int], groups: str) -> Tensor:
    group = groups_by_name(groups)
    shape = list(x.shape)
    shape[dim] = sum(_by_rank(sizes, group.context_size)[group.context_rank])
    return x.new_empty(shape)


register_adjoint(gather_operator, scatter_sum)


def gather(x: Tensor, dim: int, sizes: list[int], groups: str) -> Tensor:
    """All-gather the shards of the context group along `dim`, in rank order.

    Args:
        x: this rank's shard; several segments (`[text | image]`) are concatenated along `dim`.
        sizes: number of tokens on each rank in the first segment, then on each rank in the second, and so on.
        groups: `MeshGroups.name`.
    Returns: the full tensor on every rank: the full first segment, then the second, and so on.
    Ranks: all of the context group. Forward: all-gather. Backward: reduce-scatter (sum), the true adjoint.
    Forward derivative: all-gather of the tangents.
    """
    return call_linear(gather_operator, x, dim, sizes, groups)


def own_shard(x: Tensor, dim: int, groups: MeshGroups) -> Tensor:
    """Return this rank's shard of a full tensor. Forward: slice. Backward: padding with zeros."""
    own = shard_range(x.shape[dim], groups.context_size, groups.context_rank)
    return x.narrow(dim, own.start, len(own)).contiguous()


def gather_uneven(x: Tensor, dim: int, groups: MeshGroups) -> Tensor:
    """All-gather a sharded tensor of unknown shard sizes; the sizes are all-gathered first.

    Ranks: all of the context group. Gradient: reduce-scatter (sum), the true adjoint.
    """
    if groups.context is None:
        return x
    dim %= x.ndim
    sizes = [n for (n,) in all_gather_ints([x.shape[dim]], group=groups.context)]
    return gather(x, dim, sizes, groups.name)


def _by_rank(sizes: list[int], ranks: int) -> list[list[int]]:
    """Return the segment lengths of each rank."""
    return [list(sizes[rank::ranks]) for rank in range(ranks)]
