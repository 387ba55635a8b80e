"""Communication outside attention: sum over ranks, and halo exchange with neighbouring shards."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cp.comm.packet import all_gather_tensors, layout_of, pack_tensors, packet_bytes, piece_of, unpack_tensors
from lightning_cp.comm.transfer import exchange
from lightning_cp.comm.transforms import call_linear, refuse_tangents, register_adjoint
from lightning_cp.mesh.groups import MeshGroups, groups_by_name


@torch.library.custom_op("lightning_cp::sum_over_ranks", mutates_args=())
def sum_operator(x: Tensor, groups: str) -> Tensor:
    """Custom operator of `sum_over_ranks`, without a forward derivative."""
    mesh_groups = groups_by_name(groups)
    if mesh_groups.context is None:
        return x.clone(memory_format=torch.contiguous_format)
    layouts = [layout_of([x])] * mesh_groups.context_size
    total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for (of_rank,) in all_gather_tensors([x], layouts, device=x.device, group=mesh_groups.context):
        total += of_rank
    return total.to(x.dtype)


@sum_operator.register_fake
def _(x: Tensor, groups: str) -> Tensor:
    return x.new_empty(x.shape)


register_adjoint(sum_operator, sum_operator)


def sum_over_ranks(x: Tensor, groups: str) -> Tensor:
    """Sum `x` over the ranks in rank order, in float32 or wider: bitwise equal on all ranks.

    Ranks: all of the context group, with equal shapes. Forward: all-reduce (sum). Backward: all-reduce (sum) of the
    gradient. Forward derivative: all-reduce (sum) of the tangents.
    """
    return call_linear(sum_operator, x, groups)


def halo_ranges(sizes: list[int], reach: int) -> list[tuple[int, int]]:
    """Return each rank's global range (start, end): its shard plus `reach` on both sides; empty for an empty shard."""
    total, ranges, start = sum(sizes), [], 0
    for size in sizes:
        ranges.append((max(0, start - reach), min(total, start + size + reach)) if size else (start, start))
        start += size
    return ranges


@torch.library.custom_op("lightning_cp::halo_exchange", mutates_args=())
def halo_operator(x: Tensor, dim: int, sizes: list[int], reach: int, groups: str) -> Tensor:
    """Custom operator of `halo_exchange`, without a forward derivative."""
    mesh_groups = groups_by_name(groups)
    if mesh_groups.context is None:
        return x.clone(memory_format=torch.contiguous_format)
    pieces = _exchange_slices(x, dim, *_overlaps(sizes, reach, mesh_groups), groups=mesh_groups)
    first = halo_ranges(sizes, reach)[mesh_groups.context_rank][0]
    pieces.append((sum(sizes[: mesh_groups.context_rank]) - first, x))
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda entry: entry[0])], dim)


@halo_operator.register_fake
def _(x: Tensor, dim: int, sizes: list[int], reach: int, groups: str) -> Tensor:
    first, last = halo_ranges(sizes, reach)[groups_by_name(groups).context_rank]
    shape = list(x.shape)
    shape[dim] = last - first
    return x.new_empty(shape)


@torch.library.custom_op("lightning_cp::reduce_halo", mutates_args=())
def halo_adjoint(x: Tensor, dim: int, sizes: list[int], reach: int, groups: str) -> Tensor:
    """Adjoint of `halo_operator`, same arguments: send halos back to their owners, and add them there."""
    mesh_groups = groups_by_name(groups)
    if mesh_groups.context is None:
        return x.clone(memory_format=torch.contiguous_format)
    receives, sends = _overlaps(sizes, reach, mesh_groups)
    rank = mesh_groups.context_rank
    before = sum(sizes[:rank]) - halo_ranges(sizes, reach)[rank][0]
    total = x.narrow(dim, before, sizes[rank]).clone(memory_format=torch.contiguous_format)
    for start, halo in _exchange_slices(x, dim, sends, receives, groups=mesh_groups):
        total.narrow(dim, start, halo.shape[dim]).add_(halo)
    return total


@halo_adjoint.register_fake
def _(x: Tensor, dim: int, sizes: list[int], reach: int, groups: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] = sizes[groups_by_name(groups).context_rank]
    return x.new_empty(shape)


register_adjoint(halo_operator, halo_adjoint)


def halo_exchange(x: Tensor, dim: int, sizes: list[int], reach: int, groups: str) -> Tensor:
    """Extend this rank's shard by a halo of `reach` elements on both sides (less at the ends of the sequence).

    Args:
        x: this rank's shard.
        dim: sharded dim.
        sizes: length of each rank's shard along `dim`, in rank order.
        reach: width of the halo along `dim`; may span several shards.
        groups: `MeshGroups.name`.
    Ranks: all of the context group. Forward: exchange of halos. Backward: gradients of halos are sent to their owners
        and added. Forward derivative: halo exchange of the tangent.
    """
    return call_linear(halo_operator, x, dim, sizes, reach, groups)


def fetch_halo(
    x: Tensor, dim: int, before: int, after: int, *, groups: MeshGroups
) -> tuple[Tensor | None, Tensor | None]:
    """Fetch the last `before` rows of the previous rank and the first `after` rows of the next rank.

    Unlike `halo_exchange` it needs no lengths of other ranks, and reads from the direct neighbours only.

    Args:
        x: this rank's shard, with at least max(before, after) rows on every rank; other dims are equal on all ranks.
        dim: sharded dim.
        before, after: number of rows.
    Returns: the rows before and the rows after; None at an end of the sequence, and if their number is 0.
    Ranks: all of the context group, with equal `before` and `after`. Gradient: none, sampling only.
    Raises: NotImplementedError: `x` has a tangent.
    """
    refuse_tangents("the halo exchange of a parallel VAE", x)
    rank, last, rows = groups.context_rank, groups.context_size - 1, x.shape[dim]
    assert rows >= max(before, after), f"a shard of {rows} rows is smaller than the halo of {max(before, after)}"
    sends = [(rank + 1, rows - before, before), (rank - 1, 0, after)]
    receives = [(rank - 1, 0, before), (rank + 1, 1, after)]  # 0: from the previous rank, 1: from the next rank
    valid = [[entry for entry in slices if entry[2] and 0 <= entry[0] <= last] for slices in (sends, receives)]
    halos = dict(_exchange_slices(x, dim, *valid, groups=groups)) if groups.context is not None else {}
    return halos.get(0), halos.get(1)


_Slice = tuple[int, int, int]  # peer, start, length


def _overlaps(sizes: list[int], reach: int, groups: MeshGroups) -> tuple[list[_Slice], list[_Slice]]:
    """Return the slices to send and to receive for a halo exchange.

    Sends: slices of the local shard in a peer's halo; `start` is relative to the shard. Receives: slices of a peer's
    shard in the local halo; `start` is relative to the extended shard.
    """
    rank, ranges = groups.context_rank, halo_ranges(sizes, reach)
    bounds = [(sum(sizes[:r]), sum(sizes[: r + 1])) for r in range(len(sizes))]
    sends: list[_Slice] = []
    receives: list[_Slice] = []
    for peer in (r for r in range(len(sizes)) if r != rank):
        for slices, owner, viewer, origin in (
            (sends, rank, peer, bounds[rank][0]),
            (receives, peer, rank, ranges[rank][0]),
        ):
            start, stop = max(bounds[owner][0], ranges[viewer][0]), min(bounds[owner][1], ranges[viewer][1])
            if start < stop:
                slices.append((peer, start - origin, stop - start))
    return sends, receives


def _exchange_slices(
    x: Tensor, dim: int, sends: list[_Slice], receives: list[_Slice], *, groups: MeshGroups
) -> list[tuple[int, Tensor]]:
    """Exchange slices of `x` with peers. Returns: (start, tensor) for each of `receives`."""
    assert groups.context is not None, "slices are exchanged only between several ranks"
    pieces = [piece_of(x, dim, n) for _, _, n in receives]
    out = [(peer, pack_tensors([x.narrow(dim, start, n)])) for peer, start, n in sends]
    buffers = [torch.empty(packet_bytes([piece]), dtype=torch.uint8, device=x.device) for piece in pieces]
    peers = [peer for peer, _, _ in receives]
    exchange(out, list(zip(peers, buffers, strict=True)), group=groups.context).wait()
    starts = [start for _, start, _ in receives]
    return [(s, unpack_tensors(b, [p])[0]) for s, b, p in zip(starts, buffers, pieces, strict=True)]
