"""Which heads are dealt with together: those of one rank (Ulysses), or a slice of all (rings)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """Neighbouring query heads, and the key-value heads that they use.

    Attributes:
        query, key: which, of all.
        group: query heads to a key-value head, of all.
    """

    query: slice
    key: slice
    group: int

    @property
    def queries(self) -> int:
        """How many query heads."""
        return int(self.query.stop - self.query.start)

    @property
    def keys(self) -> int:
        """How many key-value heads."""
        return int(self.key.stop - self.key.start)

    @property
    def ragged(self) -> bool:
        """Whether they do not group evenly: attention then needs a key-value head for each query head."""
        used = [head // self.group - self.key.start for head in range(self.query.start, self.query.stop)]
        even = self.queries % self.keys == 0 and used == [i // (self.queries // self.keys) for i in range(self.queries)]
        return not even

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Their share of q, k and v, [b, s, h, d]."""
        return q[:, :, self.query], k[:, :, self.key], v[:, :, self.key]

    def key_of_each(self, device: torch.device) -> Tensor:
        """The key-value head of each query head, counted from the first of these. Nothing is copied to `device`."""
        heads = torch.arange(self.query.start, self.query.stop, device=device)
        return heads.div(self.group, rounding_mode="floor") - int(self.key.start)


def assign_heads(hq: int, hk: int, degree: int) -> list[Heads]:
    """Each rank's, of hq query and hk key-value heads (hk divides hq, degree <= hq): query heads evenly, earlier ranks
    taking one more where they do not divide, and key-value heads wherever a query head uses them."""
    return _between([rank * (hq // degree) + min(rank, hq % degree) for rank in range(degree + 1)], hq // hk)


def slice_heads(hq: int, hk: int, count: int) -> list[Heads]:
    """All heads in even slices, of whole key-value heads: `count`, or one a key-value head where these are fewer."""
    count, group = min(hk, count) or 1, hq // hk
    return _between([index * hk // count * group for index in range(count + 1)], group)


def _between(bounds: Sequence[int], group: int) -> list[Heads]:
    return [Heads(slice(a, b), slice(a // group, (b - 1) // group + 1), group) for a, b in pairwise(bounds)]
