"""Which rank holds which tokens, and the gather that puts them together again."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cp.comm.packet import Piece, pack, packet_bytes, piece_of, unpack
from lightning_cp.comm.packets import all_gather_packets
from lightning_cp.comm.transfer import all_gather_ints, exchange
from lightning_cp.comm.transforms import call_linear, register_adjoint
from lightning_cp.mesh import MeshGroups, groups_by_name


def shard_sizes(length: int, ranks: int) -> tuple[int, ...]:
    """Tokens of each rank: even, earlier ranks one more where `length` does not divide."""
    return tuple(length // ranks + (rank < length % ranks) for rank in range(ranks))


def shard_range(length: int, ranks: int, rank: int) -> range:
    """Positions of one rank's tokens, of sizes as `shard_sizes` says."""
    sizes = shard_sizes(length, ranks)
    start = sum(sizes[:rank])
    return range(start, start + sizes[rank])


@torch.library.custom_op("lightning_cp::gather", mutates_args=())
def gather_operator(x: Tensor, dim: int, sizes: list[int], groups: str) -> Tensor:
    """The operator of `gather`, without a forward derivative."""
    group = groups_by_name(groups)
    if group.context is None:
        return x.clone(memory_format=torch.contiguous_format)
    segments = _by_rank(sizes, group.context_size)
    pieces = [piece_of(x, dim, sum(lengths)) for lengths in segments]
    packets = all_gather_packets(pack([x]), [packet_bytes([piece]) for piece in pieces], group=group.context)
    parts = [unpack(packet, [piece])[0] for packet, piece in zip(packets, pieces, strict=True)]
    split = [torch.split(part, lengths, dim) for part, lengths in zip(parts, segments, strict=True)]
    return torch.cat([piece for segment in zip(*split, strict=True) for piece in segment], dim)


@gather_operator.register_fake
def _(x: Tensor, dim: int, sizes: list[int], groups: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    return x.new_empty(shape)


@torch.library.custom_op("lightning_cp::scatter_sum", mutates_args=())
def scatter_sum(x: Tensor, dim: int, sizes: list[int], groups: str) -> Tensor:
    """The sum over ranks of `x`, of which each rank gets its shard: the adjoint of `gather_operator`, same arguments.

    Ranks: all of the context group. The sum is in float32 or wider.
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
    """Gather the shards of all ranks, in rank order, along `dim`: the whole, on every rank.

    Args:
        x: this rank's shard; with several segments (`[text | image]`), one after the other.
        sizes: tokens of each rank in the first segment, then of each rank in the next, ...
        groups: `MeshGroups.name`; the shards are those of its context group.
    Returns: the first segment whole, then the next, ...
    Ranks: all of the context group. Forward: all-gather. Backward: reduce-scatter (sum), the true adjoint.
    Forward derivative: all-gather of the tangents.
    """
    return call_linear(gather_operator, x, dim, sizes, groups)


def own_shard(x: Tensor, dim: int, groups: MeshGroups) -> Tensor:
    """This rank's shard of a whole tensor. Gradient: a slice; backward pads with zeros."""
    own = shard_range(x.shape[dim], groups.context_size, groups.context_rank)
    return x.narrow(dim, own.start, len(own)).contiguous()


def gather_uneven(x: Tensor, dim: int, groups: MeshGroups) -> Tensor:
    """The whole of a sharded tensor, on every rank; ranks tell each other how much they hold.

    Ranks: all of the context group. Gradient: reduce-scatter (sum), the true adjoint.
    """
    if groups.context is None:
        return x
    dim %= x.ndim
    sizes = [n for (n,) in all_gather_ints([x.shape[dim]], group=groups.context)]
    return gather(x, dim, sizes, groups.name)


def _by_rank(sizes: list[int], ranks: int) -> list[list[int]]:
    """Each rank's segments."""
    return [list(sizes[rank::ranks]) for rank in range(ranks)]
