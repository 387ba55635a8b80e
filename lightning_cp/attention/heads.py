"""Assignment of heads to ranks (Ulysses) and to slices (ring)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lightning_cp.comm.shards import shard_sizes
from lightning_cp.mesh.groups import MeshGroups
from lightning_cp.mesh.shares import Shares


@dataclass(frozen=True)
class Heads:
    """A range of query heads, and the KV heads that they use.

    Attributes:
        query, key: indices of the query and KV heads.
        queries_per_key: query heads per KV head in the whole attention.
    """

    query: slice
    key: slice
    queries_per_key: int

    @property
    def num_queries(self) -> int:
        """Number of query heads."""
        return int(self.query.stop - self.query.start)

    @property
    def num_keys(self) -> int:
        """Number of KV heads."""
        return int(self.key.stop - self.key.start)

    @property
    def ragged(self) -> bool:
        """True if the query heads do not share the KV heads evenly: attention then needs one KV head per query head."""
        used = [head // self.queries_per_key - self.key.start for head in range(self.query.start, self.query.stop)]
        queries, keys = self.num_queries, self.num_keys
        return queries % keys != 0 or used != [i // (queries // keys) for i in range(queries)]

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Select these heads of q, k and v, [b, s, h, d]."""
        return q[:, :, self.query], k[:, :, self.key], v[:, :, self.key]

    def key_of_each(self, device: torch.device) -> Tensor:
        """Return each query head's KV head, relative to the first KV head. Computed on `device`, without a copy."""
        heads = torch.arange(self.query.start, self.query.stop, device=device)
        return heads.div(self.queries_per_key, rounding_mode="floor") - int(self.key.start)


def assign_heads(hq: int, hk: int, degree: int, shares: Shares | None = None) -> list[Heads]:
    """Assign heads to `degree` ranks.

    Query heads are divided by `shard_sizes`, so each rank has at least one. A KV head goes to every rank that has one
    of its query heads.

    Args:
        hq: number of query heads, at least `degree`.
        hk: number of KV heads; divides hq.
        shares: weight of each rank, see `head_shares`; None: equal.
    """
    return _between([0, *accumulate(shard_sizes(hq, degree, shares))], hq // hk)


def head_shares(groups: MeshGroups) -> Shares | None:
    """Return the weight of each rank of a Ulysses group, by which heads are divided; None: equal.

    It is the sum of the shares of all ranks with this Ulysses coordinate, so every Ulysses group divides heads in the
    same way, also if their ranks have different shares. This must be so: the ranks of a ring, one from each Ulysses
    group, exchange K and V of the same heads.
    """
    degree = groups.context_shape[1]
    return None if groups.shares is None else tuple(sum(groups.shares[rank::degree]) for rank in range(degree))


@lru_cache(maxsize=256)
def slice_heads(hq: int, hk: int, count: int) -> Sequence[Heads]:
    """Split all heads into `count` even slices of whole KV heads; into hk slices if hk < count."""
    count, queries_per_key = min(hk, count) or 1, hq // hk
    return _between([index * hk // count * queries_per_key for index in range(count + 1)], queries_per_key)


def _between(bounds: Sequence[int], queries_per_key: int) -> list[Heads]:
    n = queries_per_key
    return [Heads(slice(a, b), slice(a // n, (b - 1) // n + 1), n) for a, b in pairwise(bounds)]
