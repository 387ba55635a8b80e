"""Shard sizes, and all-gather of sharded tensors."""

from __future__ import annotations

import zlib
from itertools import pairwise

import torch
from torch import Tensor

from lightning_cp.comm.packet import Piece, all_gather_tensors, pack_tensors, piece_of, unpack_tensors
from lightning_cp.comm.transfer import all_gather_ints, exchange
from lightning_cp.comm.transforms import call_linear, register_adjoint
from lightning_cp.errors import PeerMismatchError, ShapeError
from lightning_cp.mesh.degrees import Shares
from lightning_cp.mesh.groups import MeshGroups, groups_by_name


def shard_sizes(length: int, ranks: int, shares: Shares | None = None) -> tuple[int, ...]:
    """Divide `length` tokens (or rows, or heads) over ranks. All code that divides work over ranks uses this function.

    Equal shares: `length // ranks`, and one more on the first `length % ranks` ranks. Otherwise each rank's end is
    rounded to the nearest token. Each rank gets at least one token if there are as many tokens as ranks.

    Args: shares: weight of each rank; None: equal.
    """
    if shares is None:
        return tuple((length + ranks - 1 - rank) // ranks for rank in range(ranks))
    total, ends = sum(shares), [0]
    for rank in range(1, ranks + 1):
        end = (2 * length * sum(shares[:rank]) + total) // (2 * total)
        if length >= ranks:
            end = min(max(end, ends[-1] + 1), length - (ranks - rank))
        ends.append(end)
    return tuple(end - start for start, end in pairwise(ends))


def sizes_in(groups: MeshGroups, length: int) -> tuple[int, ...]:
    """Return the number of tokens on each rank of a context group, by the shares of its ranks."""
    return shard_sizes(length, groups.context_size, groups.shares)


def shard_range(length: int, ranks: int, rank: int, shares: Shares | None = None) -> range:
    """Return the global positions of one rank's tokens, for the sizes of `shard_sizes`."""
    sizes = shard_sizes(length, ranks, shares)
    start = sum(sizes[:rank])
    return range(start, start + sizes[rank])


@torch.library.custom_op("lightning_cp::gather", mutates_args=())
def gather_operator(x: Tensor, dim: int, sizes: list[int], groups: str) -> Tensor:
    """Custom operator of `gather_shards`, without a forward derivative."""
    mesh_groups = groups_by_name(groups)
    if mesh_groups.context is None:
        return x.clone(memory_format=torch.contiguous_format)
    segments = _by_rank(sizes, mesh_groups.context_size)
    pieces = [piece_of(x, dim, sum(lengths)) for lengths in segments]
    received = all_gather_tensors([x], [[piece] for piece in pieces], device=x.device, group=mesh_groups.context)
    shards = [shard for (shard,) in received]
    split = [torch.split(shard, lengths, dim) for shard, lengths in zip(shards, segments, strict=True)]
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
    mesh_groups = groups_by_name(groups)
    if mesh_groups.context is None:
        return x.clone(memory_format=torch.contiguous_format)
    segments = _by_rank(sizes, mesh_groups.context_size)
    pieces = iter(torch.split(x, sizes, dim))
    by_segment = [[next(pieces) for _ in segments] for _ in segments[0]]
    shards = [torch.cat(parts, dim) for parts in zip(*by_segment, strict=True)]
    total = shards[mesh_groups.context_rank].to(torch.promote_types(x.dtype, torch.float32))
    others = [rank for rank in range(mesh_groups.context_size) if rank != mesh_groups.context_rank]
    received = [(rank, torch.empty_like(pack_tensors([shards[mesh_groups.context_rank]]))) for rank in others]
    exchange([(rank, pack_tensors([shards[rank]])) for rank in others], received, group=mesh_groups.context).wait()
    for _, buffer in received:
        total = total + unpack_tensors(buffer, [Piece(tuple(total.shape), x.dtype)])[0]
    return total.to(x.dtype, copy=True, memory_format=torch.contiguous_format)


@scatter_sum.register_fake
def _(x: Tensor, dim: int, sizes: list[int], groups: str) -> Tensor:
    mesh_groups = groups_by_name(groups)
    shape = list(x.shape)
    shape[dim] = sum(_by_rank(sizes, mesh_groups.context_size)[mesh_groups.context_rank])
    return x.new_empty(shape)


register_adjoint(gather_operator, scatter_sum)


def gather_shards(x: Tensor, dim: int, sizes: list[int], groups: str) -> Tensor:
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


def own_shard(x: Tensor, dim: int, groups: MeshGroups, order: Tensor | None = None) -> Tensor:
    """Return this rank's shard of a full tensor. Forward: slice. Backward: padding with zeros.

    Args: order: position in `x` of the token at each place of the shards, in rank order; None: ascending.
    """
    check_dim(x, dim)
    positions = shard_range(x.shape[dim], groups.context_size, groups.context_rank, groups.shares)
    if order is None:
        return x.narrow(dim, positions.start, len(positions)).contiguous()
    own = checked_order("tokens", order, x.shape[dim])[positions.start : positions.stop]
    return x.index_select(dim, own.to(x.device))


def gather_uneven(x: Tensor, dim: int, groups: MeshGroups, order: Tensor | None = None) -> Tensor:
    """All-gather a sharded tensor of unknown shard sizes; the sizes are all-gathered first.

    Args: order: the order that `own_shard` got, to undo it.
    Ranks: all of the context group. Gradient: reduce-scatter (sum), the true adjoint.
    Raises: ShapeError: no such dim. PeerMismatchError: shards differ in more than this dim, on all ranks.
    """
    check_dim(x, dim)
    dim %= x.ndim
    if groups.context is not None:
        rest = [n for i, n in enumerate(x.shape) if i != dim]
        kind = zlib.crc32(repr((dim, rest, x.dtype)).encode())
        by_rank = all_gather_ints([x.shape[dim], kind], group=groups.context)
        if any(other != kind for _, other in by_rank):
            raise PeerMismatchError(
                f"a shard {tuple(x.shape)} in {x.dtype} on this rank cannot be gathered along dim {dim}: shards may "
                "differ between the ranks of a context group in this dim only"
            )
        x = gather_shards(x, dim, [n for n, _ in by_rank], groups.name)
    if order is None:
        return x
    return x.index_select(dim, checked_order("tokens", order, x.shape[dim]).argsort().to(x.device))


def check_dim(x: Tensor, dim: int) -> None:
    """Check a dim to shard or gather. Raises: ShapeError: the tensor does not have it."""
    if not -x.ndim <= dim < x.ndim:
        raise ShapeError(f"dim {dim} must be a dim of the tensor {tuple(x.shape)}")


def checked_order(name: str, order: Tensor, length: int) -> Tensor:
    """Return an order as int64 on the host. Raises: ShapeError: it does not hold each position once."""
    order = order.detach().to("cpu", torch.int64)
    if not torch.equal(order.sort()[0], torch.arange(length, device="cpu")):
        raise ShapeError(
            f"the order of {name} {tuple(order.shape)} must hold each position from 0 to {length - 1} once"
        )
    return order


def _by_rank(sizes: list[int], ranks: int) -> list[list[int]]:
    return [list(sizes[rank::ranks]) for rank in range(ranks)]
