"""Define an endless order of global batches, each of samples from one bucket."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_cp.data.keyed_random import RandomStream, keyed_generator

Indices = NDArray[np.int64]

LEFTOVERS = ("carry", "drop", "repeat")


def bucket_members(buckets: Iterable[Hashable]) -> dict[Hashable, Indices]:
    """Group sample indices by bucket key: key -> ascending int64 indices, keys in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    numbered = np.fromiter((numbers.setdefault(key, len(numbers)) for key in buckets), dtype=np.int64)
    by_bucket = np.argsort(numbered, kind="stable")
    ends = np.cumsum(np.bincount(numbered, minlength=len(numbers)))
    return dict(zip(numbers, np.split(by_bucket, ends[:-1]), strict=True)) if numbers else {}


@dataclass(frozen=True, eq=False)
class BucketOrder:
    """The batches of every epoch, as a function of (seed, epoch) alone.

    Each bucket has an endless sequence of samples: a keyed permutation of its members for epoch 0, then another one for
    epoch 1, and so on. `leftovers` defines how the sequence of a bucket with n members is cut into batches of size B:

    - "carry": batch j holds positions j B to (j + 1) B - 1, and belongs to the epoch in which it is complete. Epoch e
      has floor((e + 1) n / B) - floor(e n / B) batches. No sample is lost.
    - "drop": each epoch has floor(n / B) batches, without the last n mod B samples of its permutation.
    - "repeat": each epoch has ceil(n / B) batches; the last one is filled with the first samples of the permutation.

    Args:
        members: sample indices of each bucket, int64.
        batch_size: B, the global batch size.
        seed: seed of the order.
        leftovers: one of `LEFTOVERS`.
        shuffle: False for index order within a bucket, one bucket after another.
    """

    members: tuple[Indices, ...]
    batch_size: int
    seed: int
    leftovers: str
    shuffle: bool = True

    @property
    def num_samples(self) -> int:
        """Number of samples of all buckets."""
        return sum(len(indices) for indices in self.members)

    @property
    def has_equal_epochs(self) -> bool:
        """True if every epoch has the same number of batches."""
        return self.leftovers != "carry" or not any(len(indices) % self.batch_size for indices in self.members)

    def batches_before(self, epoch: int) -> int:
        """Return the number of batches of all epochs before `epoch`."""
        return sum(self._batches_before(len(indices), epoch) for indices in self.members)

    def epoch_at(self, step: int) -> tuple[int, int]:
        """Return (epoch, position in the epoch) of a batch counted over all epochs.

        Raises: ValueError: `step` is negative.
        """
        if step < 0:
            raise ValueError(f"step={step} must be at least 0: it counts batches over all epochs")
        last = 1
        while self.batches_before(last) <= step:
            last *= 2
        # The last epoch that starts at or before the step: with "carry", an epoch of few samples may have no batch.
        epoch = bisect_right(range(last + 1), step, key=self.batches_before) - 1
        return epoch, step - self.batches_before(epoch)

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Indices, Indices]]:
        """Yield an epoch's global batches from position `start`: sample indices and their epochs, int64 [batch_size].

        The epoch of a sample is the epoch of the permutation that it comes from: with "carry" it may be before `epoch`.
        """
        drawn = [self._samples(bucket, epoch) for bucket in range(len(self.members))]
        indices, epochs = (np.concatenate(parts).reshape(-1, self.batch_size) for parts in zip(*drawn, strict=True))
        rows = np.arange(len(indices))
        if self.shuffle and len(self.members) > 1:
            rows = keyed_generator(self.seed, RandomStream.BATCHES, step=epoch).permutation(len(indices))
        for row in rows[start:]:
            yield indices[row], epochs[row]

    def _batches_before(self, count: int, epoch: int) -> int:
        """Return the number of batches before `epoch` of a bucket with `count` members."""
        if self.leftovers == "carry":
            return epoch * count // self.batch_size
        return epoch * (count // self.batch_size if self.leftovers == "drop" else -(-count // self.batch_size))

    def _samples(self, bucket: int, epoch: int) -> tuple[Indices, Indices]:
        """Return the samples of a bucket's batches in an epoch, and the epoch of each: int64 [batches * batch_size]."""
        count = len(self.members[bucket])
        first, end = (self.batch_size * self._batches_before(count, e) for e in (epoch, epoch + 1))
        if self.leftovers == "carry":
            positions = np.arange(first, end)
        else:
            positions = epoch * count + np.arange(end - first) % count
        epochs = positions // count
        if not len(positions):
            return positions, epochs
        oldest, newest = int(epochs[0]), int(epochs[-1])
        sequence = np.concatenate([self._permutation(bucket, e) for e in range(oldest, newest + 1)])
        return self.members[bucket][sequence[positions - oldest * count]], epochs

    def _permutation(self, bucket: int, epoch: int) -> Indices:
        count = len(self.members[bucket])
        if not self.shuffle:
            return np.arange(count)
        return keyed_generator(self.seed, RandomStream.ORDER, step=epoch, index=bucket).permutation(count)
