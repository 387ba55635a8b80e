"""Sample global batches, and divide each over data groups by the work of its samples."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from typing_extensions import override

from lightning_cp.data.batch_division import BatchDivision
from lightning_cp.data.bucket_order import BucketOrder, Indices, bucket_members
from lightning_cp.data.bucket_sampler import digest
from lightning_cp.data.sampler import OrderSampler
from lightning_cp.data.step_degrees import StepDegrees

_log = logging.getLogger("lightning.fabric.divided_batches")  # child of a logger with a handler
_REPORTED = 200  # batches that a report reads


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
