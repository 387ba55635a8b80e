"""Sample global batches of several sizes, and divide each over data groups, so that all have about the same work."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from typing_extensions import override

from lightning_cp.data.bucket_sampler import digest
from lightning_cp.data.sampler import BucketOrder, Indices, OrderSampler, bucket_members

REDUCTIONS = ("samples", "tokens")
_log = logging.getLogger("lightning.fabric.divided_batches")  # child of a logger with a handler
_REPORTED = 200  # batches that a report reads


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


class Shard(NamedTuple):
    """This rank's share of the data. Attributes: rank: index of its data group; size: number of data groups."""

    rank: int
    size: int


@dataclass(frozen=True)
class StepDegrees:
    """The context degrees of a job, and this rank's data group at each of them.

    Args:
        shards: data group of this rank by context degree; the largest degree is used for the longest samples.
        by_tokens: largest number of tokens of a sample -> the degree for samples of this length.
    Raises: ValueError: a degree of `by_tokens` is not in `shards`.
    """

    shards: Mapping[int, Shard]
    by_tokens: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tokens, degree in self.by_tokens.items():
            if degree not in self.shards:
                raise ValueError(f"by_tokens={{{tokens}: {degree}}}: the degree must be one of {sorted(self.shards)}")

    @classmethod
    def fixed(cls, shard: Shard) -> StepDegrees:
        """Return the degrees of a job with one degree."""
        return cls({1: shard})

    def degree_of(self, tokens: int) -> int:
        """Return the context degree of a step. Args: tokens: length of its longest sample."""
        return min(
            ((limit, degree) for limit, degree in self.by_tokens.items() if tokens <= limit),
            default=(0, max(self.shards)),
        )[1]


class DrawnSample(NamedTuple):
    """A sample of a divided batch.

    Attributes:
        item: its number in the data set.
        epoch: the epoch that it is drawn from.
        part: number of the part of this data rank's samples that it belongs to.
        position: its index in the global batch, which selects noise and times.
        weight: factor of its loss.
        scale: data groups divided by samples of the global batch: the mean over all ranks of scale × the sum of their
            losses is the mean over the global batch. 0 for a sample that is repeated without counting it.
        degree: context degree of the step.
    """

    item: int
    epoch: int
    part: int
    position: int
    weight: float
    scale: float
    degree: int


class DividedBatchSampler(OrderSampler):
    """Yield this data rank's samples of each global batch, as `DrawnSample`, divided by `BatchDivision`.

    The global batches depend only on (seed, epoch). Samples that do not fill a batch at the end of an epoch are used in
    the next one, so none is lost. Pass the sampler to a DataLoader of `DividedData` as `batch_sampler`.

    Args:
        division: how a batch is divided over the data groups.
        batch_size: global batch size, over all data ranks; not necessarily a multiple of their number.
        degrees: data group of this rank, by the context degree of a step.
        mixed: True: a batch holds samples of all sizes, in random order. False: samples of one size, see
            `BucketBatchSampler`.
        seed: seed of the order.
    Raises: ValueError: batch_size is less than the number of data groups or more than the number of samples, or a
        sample has fewer tokens than ranks that may share it.

    The result of `report` is logged on rank 0.
    """

    _order_settings = ("mixed", *OrderSampler._order_settings, "leftovers", "assignment")
    leftovers = "carry"

    def __init__(
        self, division: BatchDivision, batch_size: int, degrees: StepDegrees, *, mixed: bool = True, seed: int = 0
    ) -> None:
        self.division, self.degrees, self.mixed = division, degrees, mixed
        number, most = len(division.tokens), max(shard.size for shard in degrees.shards.values())
        if not most <= batch_size <= number:
            raise ValueError(
                f"batch_size={batch_size} must be at least the {most} data groups, so that each of them has a sample, "
                f"and at most the {number} samples of the data set"
            )
        _check_lengths(division.tokens, degrees, mixed)
        members = (np.arange(number),) if mixed else tuple(bucket_members(division.buckets).values())
        self.assignment = digest(members)  # a `BucketBatchSampler` continues the order of batches of one size
        shard = degrees.shards[max(degrees.shards)]
        order = BucketOrder(members, batch_size, seed, leftovers="carry")
        super().__init__(order, data_rank=shard.rank, data_size=shard.size, with_epoch=True)
        if shard.rank == 0 and not (dist.is_initialized() and dist.get_rank()):
            _log.info(self.report())

    @override
    def _check_batch_size(self, data_size: int) -> None:
        """Accept all sizes: groups get different numbers of samples."""

    @property
    @override
    def first_index(self) -> int:
        """0: each sample of a divided batch has its own index."""
        return 0

    @override
    def _share(self, indices: Indices, epochs: Indices) -> list[Any]:
        samples = indices.tolist()
        degree = self._degree_of(samples)
        shard = self.degrees.shards[degree]
        weights, scale = self.division.loss_weights(samples), shard.size / len(samples)
        return [
            DrawnSample(samples[x], int(epochs[x]), number, x, weights[x], scale if part.is_counted else 0.0, degree)
            for number, part in enumerate(self.division.parts(samples, shard.size)[shard.rank])
            for x in part.positions
        ]

    def _degree_of(self, samples: list[int]) -> int:
        return self.degrees.degree_of(max(self.division.tokens[sample] for sample in samples))

    def report(self) -> str:
        """Describe how evenly groups share the work of the first epoch, and the work with each degree for all steps."""
        division, degrees = self.division, self.degrees
        batches = list(self._first_batches())
        used = [self._degree_of(batch) for batch in batches]
        sizes = [degrees.shards[degree].size for degree in used]
        even, plain = (
            np.mean([division.imbalance(*pair, balanced=balanced) for pair in zip(batches, sizes, strict=True)])
            for balanced in (True, False)
        )
        groups = " to ".join(map(str, sorted({min(sizes), max(sizes)})))
        text = (
            f"{self.num_samples} samples of {len(set(division.buckets))} sizes in batches of {self.batch_size} for "
            f"{groups} data groups: the longest group has {even:.3f} times the mean work "
            f"({plain:.3f} without balancing)"
        )
        if not degrees.by_tokens:
            return text
        chosen = self._longest(batches, used)
        lines = [f"{text}. Tokens and tokens² of the longest rank in {len(batches)} steps, divided by those by_tokens:"]
        for degree in sorted(degrees.shards):
            fixed = self._longest(batches, [degree] * len(batches))
            tokens, squares = (a / b for a, b in zip(fixed, chosen, strict=True))
            lines.append(
                f"  context degree {degree}: {used.count(degree)} steps; if all had it, {tokens:.3f} and {squares:.3f}"
            )
        return "\n".join(lines)

    def _longest(self, batches: list[list[int]], used: list[int]) -> tuple[float, float]:
        """Return tokens and tokens² of the rank with the most, added over steps. Args: used: degree of each step."""
        totals = np.zeros(2)
        for samples, degree in zip(batches, used, strict=True):
            tokens = np.asarray([self.division.tokens[sample] for sample in samples], dtype=float)
            groups = self.division.groups(samples, self.degrees.shards[degree].size)
            loads = np.asarray([(tokens[group].sum(), (tokens[group] ** 2).sum()) for group in groups])
            totals += loads.max(axis=0) / degree
        return float(totals[0]), float(totals[1])

    def _first_batches(self) -> Iterator[list[int]]:
        """Yield the first global batches; with few samples of a size, an epoch may have none."""
        batches = (indices.tolist() for epoch in count() for indices, _ in self.order.batches(epoch))
        return islice(batches, min(_REPORTED, -(-self.num_samples // self.batch_size)))


def _check_lengths(tokens: Sequence[int], degrees: StepDegrees, mixed: bool) -> None:
    """Check that each rank of a context group gets tokens of every sample. Raises: ValueError: not of the shortest."""
    shortest = min(tokens)
    degree = max(degrees.shards) if mixed else degrees.degree_of(shortest)
    if shortest < degree:
        raise ValueError(
            f"a sample has {shortest} tokens, which {degree} ranks (ring x ulysses) cannot share: leave it out, or "
            f"lower the degrees to at most {shortest}"
        )
