"""What an attention call needs besides its tensors, derived and checked once for equal shapes, lengths and settings."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_cp.attention.call import Lengths, Settings, are_known, exchange_lengths, ring_of, ulysses_of
from lightning_cp.attention.keys import Ring
from lightning_cp.attention.ulysses import Ulysses
from lightning_cp.mesh import MeshGroups

_KEPT = 256  # calls of each mesh; a model has a few kinds of attention for each size of its inputs
_KINDS = ("", "key_mask", "query_mask")
T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """Settings of the exchanges of a call. Attributes: encoded_lengths: see `encode_lengths`."""

    ring: Ring
    ulysses: Ulysses | None
    encoded_lengths: Tensor


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    q_lengths: list[int],
    kv_lengths: list[int],
    groups: MeshGroups,
    settings: tuple[Any, ...],
) -> Prepared:
    """Check a call, and return its exchanges. Kept for later calls, unless ranks have to exchange lengths.

    Args: settings: values of `Settings`, in its order.
    Other Args, Ranks, Raises: see `exchange_lengths`.
    """

    def build() -> Prepared:
        lengths = exchange_lengths(
            q, k, v, mask, q_lengths=q_lengths, kv_lengths=kv_lengths, groups=groups, settings=Settings(*settings)
        )
        ulysses = ulysses_of(lengths, q.shape[2], k.shape[2], groups=groups)
        return Prepared(ring_of(lengths, groups=groups, settings=Settings(*settings)), ulysses, encode_lengths(lengths))

    if not are_known(q_lengths, kv_lengths, mask, groups):
        return build()
    tensors = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device)
    of_mask = None if mask is None else (mask.shape, mask.dtype, mask.requires_grad)
    return _kept(groups, (tensors, of_mask, tuple(q_lengths), tuple(kv_lengths), settings), build)


def prepared_again(
    encoded_lengths: Tensor, hq: int, hk: int, *, groups: MeshGroups, settings: tuple[Any, ...]
) -> tuple[Ring, Ulysses | None]:
    """Return the exchanges of an earlier call. Args: hq, hk: number of query and KV heads of all ranks."""
    numbers: list[int] = encoded_lengths.tolist()

    def build() -> tuple[Ring, Ulysses | None]:
        lengths = _decoded(numbers, groups)
        return ring_of(lengths, groups=groups, settings=Settings(*settings)), ulysses_of(lengths, hq, hk, groups=groups)

    return _kept(groups, (tuple(numbers), hq, hk, settings), build)


def encode_lengths(lengths: Lengths) -> Tensor:
    """Encode lengths and kind of mask as an int64 tensor on the host, since an operator returns only tensors."""
    numbers = [_KINDS.index(lengths.mask_kind), *lengths.query, *lengths.key, *lengths.mask_query_sizes]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _decoded(numbers: list[int], groups: MeshGroups) -> Lengths:
    kind, *sizes = numbers
    size = groups.context_size
    query, key, mask_queries = (tuple(sizes[i * size : (i + 1) * size]) for i in range(3))
    return Lengths(query, key, _KINDS[kind], mask_queries)


def _kept(groups: MeshGroups, facts: Hashable, build: Callable[[], T]) -> T:
    """Return what was built for these facts before, or build it; kept as long as the groups."""
    found: T | None = groups.prepared.get(facts)
    if found is None:
        if len(groups.prepared) >= _KEPT:
            groups.prepared.clear()
        found = groups.prepared[facts] = build()
    return found
