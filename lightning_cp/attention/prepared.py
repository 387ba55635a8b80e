"""Exchanges of an attention call: derived and checked once for equal shapes, lengths and settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_cp.attention.call import Lengths, Settings, are_known, exchange_lengths, ring_of, ulysses_of
from lightning_cp.attention.keys import Ring
from lightning_cp.attention.sparse.mask import SparseMask
from lightning_cp.attention.ulysses import Ulysses
from lightning_cp.comm.background import is_capturing
from lightning_cp.mesh.groups import MeshGroups, groups_by_name

_KINDS = ("", "key_mask", "query_mask")


@dataclass(frozen=True)
class Prepared:
    """Settings of the exchanges of a call. Attributes: encoded_lengths: see `encode_lengths`."""

    ring: Ring
    ulysses: Ulysses | None
    encoded_lengths: Tensor


def prepare_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    q_lengths: list[int],
    kv_lengths: list[int],
    settings: Settings,
    sparse: SparseMask | None = None,
) -> Prepared:
    """Check a call, and return its exchanges. Kept for later calls, unless ranks have to exchange lengths.

    With known lengths, ranks compare the first call of a kind, and the first with a block mask. On CPU they compare
    every call with a block mask, and every call with the lengths of an earlier one: with other masks, or without one,
    other tokens are exchanged. On CUDA the host would wait for the GPU in each of these calls.

    Args, Ranks, Raises: see `exchange_lengths`.
    """
    groups = groups_by_name(settings.groups)
    by_lengths = (tuple(q_lengths), tuple(kv_lengths))
    tensors = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device)
    of_mask = None if mask is None else (mask.shape, mask.dtype, mask.requires_grad)
    facts = (tensors, of_mask, *by_lengths, settings)
    of_call = (*facts, None if sparse is None else sparse.checksum)
    is_known, compare = are_known(q_lengths, kv_lengths, mask, groups), False
    if is_known and groups.context is not None and not is_capturing():
        is_sparse = not q.is_cuda and (sparse is not None or by_lengths in groups.compared)
        compare = is_sparse or of_call not in groups.compared

    def find_lengths() -> Lengths:
        return exchange_lengths(
            q,
            k,
            v,
            mask,
            q_lengths=q_lengths,
            kv_lengths=kv_lengths,
            groups=groups,
            settings=settings,
            sparse=sparse,
            compare=compare,
        )

    lengths = find_lengths() if compare or not is_known else None
    if compare:
        groups.note_compared(of_call)
        if sparse is not None:
            groups.note_compared(by_lengths)

    def build() -> Prepared:
        known = lengths or find_lengths()
        encoded = encode_lengths(known)
        ring, ulysses = _exchanges(known, q.shape[2], k.shape[2], settings, sparse, q.device)
        return Prepared(ring, ulysses, encoded)

    if not is_known:
        return build()
    return (groups.memoize if sparse is None else sparse.memoize)(facts, build)


def _exchanges(
    lengths: Lengths, hq: int, hk: int, settings: Settings, sparse: SparseMask | None, device: torch.device
) -> tuple[Ring, Ulysses | None]:
    """Return the exchanges of a call. Those with a sparse mask are kept with it."""
    groups = groups_by_name(settings.groups)
    ulysses = ulysses_of(lengths, hq, hk, groups=groups)
    if sparse is None:
        return ring_of(lengths, groups=groups, settings=settings), ulysses
    heads = slice(0, hq) if ulysses is None else ulysses.own_heads.query

    def build() -> Ring:
        return ring_of(lengths, groups=groups, settings=settings, sparse=sparse, heads=heads, device=device)

    return sparse.memoize((lengths, settings, heads.start, heads.stop, device), build), ulysses


def prepared_again(
    encoded_lengths: Tensor, hq: int, hk: int, *, settings: Settings, sparse: SparseMask | None, device: torch.device
) -> tuple[Ring, Ulysses | None]:
    """Return the exchanges of an earlier call. Args: hq, hk: number of query and KV heads of all ranks."""
    groups = groups_by_name(settings.groups)
    numbers: list[int] = encoded_lengths.tolist()

    def build() -> tuple[Ring, Ulysses | None]:
        return _exchanges(_decoded(numbers, groups), hq, hk, settings, sparse, device)

    if sparse is not None:
        return sparse.memoize((tuple(numbers), hq, hk, settings, device), build)
    return groups.memoize((tuple(numbers), hq, hk, settings), build)


def encode_lengths(lengths: Lengths) -> Tensor:
    """Encode lengths and kind of mask as an int64 tensor on the host, since an operator returns only tensors."""
    numbers = [_KINDS.index(lengths.mask_kind), *lengths.query, *lengths.key, *lengths.mask_query_sizes]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _decoded(numbers: list[int], groups: MeshGroups) -> Lengths:
    kind, *sizes = numbers
    size = groups.context_size
    query, key, mask_queries = (tuple(sizes[i * size : (i + 1) * size]) for i in range(3))
    return Lengths(query, key, _KINDS[kind], mask_queries)
