"""Heads: assigned to ranks (Ulysses) and slices (ring), and q, k and v exchanged as one tensor with joined heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.comm.packet import BUFFERS, as_bytes
from lightning_cp.comm.shards import shard_sizes
from lightning_cp.comm.transfer import exchange_flat
from lightning_cp.mesh.degrees import Shares
from lightning_cp.mesh.groups import MeshGroups


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


@dataclass(frozen=True)
class JointHeads:
    """Exchange of several tensors of equal lengths, with the heads of each token joined.

    Attributes:
        group, rank: process group, and this rank in it.
        lengths: number of tokens on each rank.
        heads: for each rank, its number of heads in each of the tensors.
    """

    group: dist.ProcessGroup
    rank: int
    lengths: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...]

    @cached_property
    def is_even(self) -> bool:
        """True if all ranks have the same numbers of tokens and heads: no Python code runs per rank."""
        return len(set(self.lengths)) == len(set(self.heads)) == 1

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Number of joined heads on each rank."""
        return tuple(map(sum, self.heads))

    def to_heads(self, tensors: Sequence[Tensor]) -> Tensor:
        """Exchange [b, s_local, h, d] each -> [s_group, b, joined own heads, d]. Ranks: all of the group."""
        x, width, ranks = tensors[0], self.widths[self.rank], len(self.lengths)
        b, s, _, d = x.shape
        received = x.new_empty(sum(self.lengths), b, width, d)
        buffer = BUFFERS.take(s * sum(self.widths) * b * d * x.element_size(), x)
        sizes = self._sizes_bytes(x)
        if sizes is None:
            parts = [
                y.view(b, s, ranks, heads, d).permute(2, 1, 0, 3, 4)
                for y, heads in zip(tensors, self.heads[0], strict=True)
            ]
            torch.cat(parts, 3, out=buffer.view(x.dtype).view(ranks, s, b, width, d))
        else:
            for rank, part in enumerate(torch.split(buffer, sizes[0])):
                joined = part.view(x.dtype).view(s, b, self.widths[rank], d)
                torch.cat([tokens_first(y) for y in self._of(tensors, rank)], 2, out=joined)
        exchange_flat(buffer, as_bytes(received), sizes, group=self.group).wait()
        BUFFERS.give(buffer)
        return received

    def to_tokens(self, tensors: list[Tensor]) -> list[Tensor]:
        """Exchange [b, s_group, own heads, d] each -> [b, s_local, h, d] each. Ranks: all of the group.

        Args: tensors: emptied as soon as they are copied, so that their memory can be reused.
        """
        x, s, width, ranks = tensors[0], self.lengths[self.rank], self.widths[self.rank], len(self.lengths)
        (b, s_group, _, d), dtype, sizes = x.shape, x.dtype, self._sizes_bytes(x)
        item = b * d * x.element_size()
        sent = BUFFERS.take(s_group * width * item, x)
        torch.cat([tokens_first(y) for y in tensors], 2, out=sent.view(dtype).view(s_group, b, width, d))
        tensors.clear()
        del x
        received = BUFFERS.take(s * sum(self.widths) * item, sent)
        exchange_flat(sent, received, sizes and (sizes[1], sizes[0]), group=self.group).wait()
        BUFFERS.give(sent)
        del sent
        if sizes is None:
            by_rank = received.view(dtype).view(ranks, s, b, width, d).permute(2, 1, 0, 3, 4)
            parts = by_rank.split_with_sizes(self.heads[0], 3)
            results = [
                part.clone(memory_format=torch.contiguous_format).view(b, s, ranks * part.shape[3], d) for part in parts
            ]
        else:
            results = [
                received.new_empty(b, s, heads, d, dtype=dtype) for heads in map(sum, zip(*self.heads, strict=True))
            ]
            for rank, piece in enumerate(torch.split(received, sizes[0])):
                part = tokens_first(piece.view(dtype).view(s, b, self.widths[rank], d))
                for target, y in zip(self._of(results, rank), part.split_with_sizes(self.heads[rank], 2), strict=True):
                    target.copy_(y)
        BUFFERS.give(received)
        return results

    def own(self, joined: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's part of each tensor, [b, s_group, own heads, d], as views of the result of `to_heads`."""
        return tokens_first(joined).split_with_sizes(self.heads[self.rank], 2)

    def _of(self, tensors: Sequence[Tensor], rank: int) -> list[Tensor]:
        starts = [sum(column[:rank]) for column in zip(*self.heads, strict=True)]
        entries = zip(tensors, starts, self.heads[rank], strict=True)
        return [x[:, :, start : start + heads] for x, start, heads in entries]

    def _sizes_bytes(self, x: Tensor) -> tuple[list[int], list[int]] | None:
        """Return the bytes to each rank, and from each rank, of `to_heads`; None if all are equal."""
        if self.is_even:
            return None
        item = x.shape[0] * x.shape[3] * x.element_size()
        s, local_width = self.lengths[self.rank] * item, self.widths[self.rank] * item
        return [s * width for width in self.widths], [local_width * length for length in self.lengths]


def tokens_first(x: Tensor) -> Tensor:
    """Transpose [b, s, ...] to [s, b, ...] or back."""
    return x.transpose(0, 1)
