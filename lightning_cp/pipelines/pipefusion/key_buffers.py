"""Attention over buffered keys: tokens are computed patch by patch, and each patch attends to the whole sequence.

A buffer holds the keys of the whole sequence. A patch replaces its own keys and attends to all of them: keys of this
patch and of earlier ones are new, keys of later patches are those of the previous evaluation of the model.
Source: Fang et al., arXiv:2405.14430 (PipeFusion).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_cp.attention.api import attention_dtype
from lightning_cp.attention.call import Lengths, Settings, check_tensors, four_dims, ring_of, ulysses_of
from lightning_cp.attention.ring import ring_forward
from lightning_cp.attention.ulysses import partial_to_tokens, tokens_to_heads
from lightning_cp.comm.packet import all_gather_tensors, piece_of
from lightning_cp.errors import ShapeError
from lightning_cp.mesh.groups import SINGLE_RANK, MeshGroups, groups_by_name

Ranges = tuple[range, ...]


@dataclass(eq=False)
class Buffer:
    """Tensors that are kept between two evaluations, the same on all ranks of the context group."""

    tensors: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class KeyBuffer(Buffer):
    """Keys, values and key mask of one attention call, over the whole sequence and for this rank's heads.

    Attributes:
        tensors: K and V [b, h, s, d] and, if the call has a key mask, the mask [b or 1, h or 1, 1, s].
    """

    def put(self, tensors: Sequence[Tensor], ranges: Sequence[range], total: int) -> None:
        """Replace the keys at some positions.

        Args:
            tensors: K and V [b, h, n, d] and the key mask [.., .., 1, n], if there is one.
            ranges: positions of the n keys in the sequence. total: number of keys of the whole sequence.
        Raises: ShapeError: a shape differs from the buffer's.
        """
        shapes = [_whole_shape(x, i, total) for i, x in enumerate(tensors)]
        if not self.tensors:
            self.tensors = [x.new_empty(shape) for x, shape in zip(tensors, shapes, strict=True)]
        if [tuple(x.shape) for x in self.tensors] != shapes:
            raise ShapeError(
                f"keys of a patch belong to a sequence of shapes {shapes}, but the buffers have "
                f"{[tuple(x.shape) for x in self.tensors]}: the arguments of the transformer changed between two steps"
            )
        start = 0
        for positions in ranges:
            for i, (whole, x) in enumerate(zip(self.tensors, tensors, strict=True)):
                dim = _dim_of_keys(i)
                whole.narrow(dim, positions.start, len(positions)).copy_(x.narrow(dim, start, len(positions)))
            start += len(positions)


def attend_buffered(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    buffer: KeyBuffer,
    ranges: Sequence[Ranges],
    total: int,
    q_lengths: Sequence[int],
    settings: Settings,
) -> Tensor:
    """Put the keys of all ranks into `buffer`, and compute attention of the local queries over the whole buffer.

    Each rank sends its new keys by Ulysses, then those of its heads to the other ring ranks, by all-gather.

    Args:
        query: [b, s_local, hq, d]. key, value: [b, keys_local, hk, d], the new keys.
        mask: [b, keys_local] or [b or 1, hq or 1, 1, keys_local]: mask of the new keys, which is buffered with them.
            [b or 1, hq or 1, s_local or 1, total]: mask of the local queries over all keys.
        ranges: for each rank, the positions of its new keys in the whole sequence, in the order of its tensor.
        total: number of keys of the whole sequence.
        q_lengths: number of queries on each rank.
    Returns: [b, s_local, hq, d]. Ranks: all of the context group. Gradient: none.
    Raises: ShapeError, KernelError: shapes, dtypes or the mask do not fit; an input requires a gradient.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        raise ShapeError("attention over buffered keys has no gradient: use torch.no_grad()")
    query, key, value = (x.to(attention_dtype(x)) for x in (query, key, value))
    mask, groups = four_dims(mask, key), groups_by_name(settings.groups)
    check_tensors(query, key, value, mask, groups=groups, settings=settings)
    lengths = _lengths(query, key, mask, q_lengths=q_lengths, ranges=ranges, total=total)
    if mask is not None and lengths.mask_kind == "query_mask":  # one row may be that of all queries, or of the only one
        mask = mask.expand(-1, -1, query.shape[1], -1)
    ulysses = ulysses_of(lengths, query.shape[2], key.shape[2], groups=groups)
    if ulysses is not None:
        query, key, value, mask = tokens_to_heads(query, key, value, mask, to=ulysses)
    new = [key.transpose(1, 2), value.transpose(1, 2)]
    if mask is not None and lengths.mask_kind == "key_mask":
        new.append(mask)
    _receive(new, buffer, ranges=ranges, total=total, groups=groups)
    keys, values, *masks = buffer.tensors
    all_keys = Lengths((0,), (total,), "query_mask" if mask is not None else "")
    ring = ring_of(all_keys, groups=SINGLE_RANK, settings=settings)
    part = ring_forward(query, keys.transpose(1, 2), values.transpose(1, 2), masks[0] if masks else mask, ring=ring)
    if ulysses is None:
        return part.out.contiguous()
    return partial_to_tokens(part, with_lse=False, to=ulysses)[0].contiguous()


def _lengths(
    q: Tensor, k: Tensor, mask: Tensor | None, *, q_lengths: Sequence[int], ranges: Sequence[Ranges], total: int
) -> Lengths:
    """Return the lengths on each rank and the kind of the mask. Raises: ShapeError: the mask has another size."""
    kv_lengths = tuple(sum(map(len, of_rank)) for of_rank in ranges)
    kind, mask_queries = "", tuple(0 for _ in q_lengths)
    if mask is not None:
        if mask.shape[-1] == k.shape[1] and mask.shape[-2] == 1:
            kind, mask_queries = "key_mask", tuple(1 for _ in q_lengths)
        elif mask.shape[-1] == total and mask.shape[-2] in (1, q.shape[1]):
            kind, mask_queries = "query_mask", tuple(q_lengths)
        else:
            raise ShapeError(
                f"attn_mask {tuple(mask.shape)} fits neither the {k.shape[1]} new keys of this rank nor all {total} "
                f"keys, for {q.shape[1]} queries"
            )
    return Lengths(tuple(q_lengths), kv_lengths, kind, mask_queries)


def _receive(new: list[Tensor], buffer: KeyBuffer, *, ranges: Sequence[Ranges], total: int, groups: MeshGroups) -> None:
    """All-gather the new keys of the ring's ranks, and put them into the buffer."""
    degree = groups.context_shape[1]
    chunks = [[x for of_rank in ranges[i : i + degree] for x in of_rank] for i in range(0, len(ranges), degree)]
    layouts = [[piece_of(x, _dim_of_keys(i), sum(map(len, chunk))) for i, x in enumerate(new)] for chunk in chunks]
    if not buffer.tensors and sum(len(x) for chunk in chunks for x in chunk) != total:
        raise ShapeError("a patch was computed before the whole sequence, so the keys of the other patches are missing")
    by_rank = all_gather_tensors(new, layouts, device=new[0].device, group=groups.ring) if groups.ring else [new]
    for tensors, chunk in zip(by_rank, chunks, strict=True):
        buffer.put(tensors, chunk, total)


def _dim_of_keys(index: int) -> int:
    return 2 if index < 2 else 3  # K and V, or the mask


def _whole_shape(x: Tensor, index: int, total: int) -> tuple[int, ...]:
    shape = list(x.shape)
    shape[_dim_of_keys(index)] = total
    return tuple(shape)
