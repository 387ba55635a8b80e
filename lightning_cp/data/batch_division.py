"""Divide global batches of samples of several sizes over data groups, so that all have about the same work."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

REDUCTIONS = ("samples", "tokens")


class Part(NamedTuple):
    """Samples of one size that pass the model together.

    Attributes:
        positions: their positions in the global batch.
        is_counted: False for a repetition, see `BatchDivision.parts`.
    """

    positions: list[int]
    is_counted: bool = True


@dataclass(frozen=True, eq=False)
class BatchDivision:
    """Division of global batches over data groups, a function of the sizes of their samples alone.

    A group gets whole samples. The most expensive sample is given away first, always to the group with the least work
    so far (Graham, SIAM J. Appl. Math. 17, 1969). The work of a sample with n tokens is n + n² / attention_tokens.

    Args:
        buckets: key of each sample of the data set; samples with equal keys have equal shapes.
        tokens: number of tokens of each sample.
        attention_tokens: number of tokens of a sample at which attention takes as long as the other layers; about six
            times the width of the transformer.
        part_size: largest number of samples that pass the model together; None: all samples of one size.
        reduction: "samples": the loss is the mean over the samples of a global batch; "tokens": over its tokens.
        weights: factor of each sample's loss; None: 1.
    Raises: ValueError: a number or a list is not valid.
    """

    buckets: Sequence[Hashable]
    tokens: Sequence[int]
    attention_tokens: float
    part_size: int | None = None
    reduction: str = "samples"
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.buckets), len(self.tokens), len(self.tokens if self.weights is None else self.weights)}
        if len(lengths) > 1:
            raise ValueError(
                f"buckets, tokens and weights must have one value per sample, got {sorted(lengths)} values"
            )
        if not self.attention_tokens > 0 or (self.part_size is not None and self.part_size < 1):
            raise ValueError(
                f"attention_tokens={self.attention_tokens} must be positive, and part_size={self.part_size} at least 1 "
                "or None"
            )
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction={self.reduction!r} must be one of {', '.join(map(repr, REDUCTIONS))}")

    @cached_property
    def work(self) -> NDArray[np.float64]:
        """Work of each sample, in units of a token without attention."""
        tokens = np.asarray(self.tokens, dtype=np.float64)
        return tokens + tokens**2 / self.attention_tokens

    def groups(self, samples: Sequence[int], data_size: int) -> list[list[int]]:
        """Return the positions of each data group's samples in a global batch, ascending.

        Args:
            samples: numbers of the samples of the global batch.
            data_size: number of data groups.
        Raises: ValueError: there are fewer samples than groups.
        """
        if len(samples) < data_size:
            raise ValueError(f"a batch of {len(samples)} samples has none for some of {data_size} data groups")
        work = self.work[np.asarray(samples)]
        members: list[list[int]] = [[] for _ in range(data_size)]
        least = [(0.0, 0, group) for group in range(data_size)]  # work, samples, group
        heapify(least)
        for position in np.argsort(-work, kind="stable").tolist():
            total, count, group = least[0]
            members[group].append(position)
            heapreplace(least, (total + float(work[position]), count + 1, group))
        return [sorted(group) for group in members]

    def parts(self, samples: Sequence[int], data_size: int) -> list[list[Part]]:
        """Return the parts of each data group, those with the most work first; see `groups`.

        All groups have the same number of parts, because a forward may have collectives of all ranks (sharded weights,
        buffers of DDP). A group with fewer repeats its smallest sample, without counting it.
        """
        divided = [self._parts(samples, group) for group in self.groups(samples, data_size)]
        number = max(map(len, divided))
        for parts in divided:
            smallest = min((x for part in parts for x in part.positions), key=lambda x: self.work[samples[x]])
            parts += [Part([smallest], is_counted=False)] * (number - len(parts))
        return divided

    def _parts(self, samples: Sequence[int], group: list[int]) -> list[Part]:
        by_bucket: dict[Hashable, list[int]] = {}
        for position in group:
            by_bucket.setdefault(self.buckets[samples[position]], []).append(position)
        size = self.part_size or len(group)
        parts = [
            Part(positions[start : start + size])
            for positions in by_bucket.values()
            for start in range(0, len(positions), size)
        ]
        return sorted(parts, key=lambda part: -self._total(samples, part.positions))

    def loss_weights(self, samples: Sequence[int]) -> list[float]:
        """Return the factor of each sample's loss; the loss is then the mean over the global batch."""
        numbers = np.asarray(samples)
        weights = np.ones(len(numbers)) if self.weights is None else np.asarray(self.weights, dtype=float)[numbers]
        if self.reduction == "tokens":
            tokens = np.asarray(self.tokens, dtype=float)[numbers]
            weights = weights * tokens / tokens.mean()
        values: list[float] = weights.tolist()
        return values

    def imbalance(self, samples: Sequence[int], data_size: int, *, balanced: bool = True) -> float:
        """Return the work of the group with the most, divided by the mean.

        Args:
            balanced: False: for groups of equal numbers of samples, in the order of the batch.
        Other arguments: see `groups`.
        """
        in_order = [x.tolist() for x in np.array_split(np.arange(len(samples)), data_size)]
        groups = self.groups(samples, data_size) if balanced else in_order
        work = [self._total(samples, group) for group in groups]
        return max(work) * data_size / sum(work)

    def _total(self, samples: Sequence[int], positions: Sequence[int]) -> float:
        return float(self.work[np.asarray(samples)[np.asarray(positions, dtype=int)]].sum())
