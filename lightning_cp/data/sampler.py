"""Define one endless data order for every strategy, of batches from one bucket each, and each rank's slice of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler
from typing_extensions import override

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


class WrappedSampler(Sampler[Any]):
    """Behave like the wrapped sampler; subclasses override parts of it.

    Args: order: a sampler of indices, or a batch sampler.
    """

    def __init__(self, order: Iterable[Any]) -> None:
        self.order = order

    def __len__(self) -> int:
        """Length of the wrapped sampler. Raises: TypeError: it has no length."""
        count: int = len(self.order)  # type: ignore[arg-type]
        return count

    def __getattr__(self, name: str) -> Any:
        """Look up other attributes on the wrapped sampler: `set_epoch`, `batch_size`, `state_dict`."""
        if name.startswith("__") or name == "order":
            raise AttributeError(name)
        return getattr(self.order, name)


class OrderSampler(Sampler[list[Any]]):
    """Yield this data rank's contiguous slice of each global batch of an order.

    The position is one step number, counted from 0 over all epochs. Pass the sampler to a DataLoader as
    `batch_sampler`; all ranks of a context group use the same `data_rank`.

    Args:
        order: the global batches.
        data_rank: index of this rank's context group (`strategy.data_rank`).
        data_size: number of context groups (`strategy.data_size`).
        with_epoch: yield (index, epoch) pairs instead of indices.
    Raises: ValueError: the batch size is not a multiple of data_size, or data_rank is out of range.
    """

    sharded_by_data_rank = True
    _order_settings: tuple[str, ...] = ("seed", "shuffle", "batch_size", "num_samples")  # they define the order

    def __init__(self, order: BucketOrder, *, data_rank: int, data_size: int, with_epoch: bool = False) -> None:
        if data_size < 1 or not 0 <= data_rank < data_size:
            raise ValueError(f"data_rank={data_rank} must be from 0 to data_size - 1, with data_size={data_size} >= 1")
        self.order = order
        self.num_samples, self.batch_size = order.num_samples, order.batch_size
        self.seed, self.shuffle = order.seed, order.shuffle
        self.data_rank, self.data_size, self.with_epoch = data_rank, data_size, with_epoch
        self._check_batch_size(data_size)
        self.sampler = AnnouncedEpochs(self)  # Lightning announces epochs to `loader.batch_sampler.sampler`
        self._epoch = 0
        self._start = 0  # first batch of the next iteration
        self._yielded = 0  # batches of this epoch yielded so far
        self._set_by_user = False

    def __len__(self) -> int:
        """Number of batches of the current epoch."""
        return self.order.batches_before(self._epoch + 1) - self.order.batches_before(self._epoch)

    @property
    def first_index(self) -> int:
        """Global batch index of this data rank's first sample."""
        return self.data_rank * (self.batch_size // self.data_size)

    @override
    def __iter__(self) -> Iterator[list[Any]]:
        start, self._start = self._start, 0
        for batch, (indices, epochs) in enumerate(self.order.batches(self._epoch, start), start=start):
            self._yielded = batch + 1
            yield self._share(indices, epochs)

    def _share(self, indices: Indices, epochs: Indices) -> list[Any]:
        """Return this data rank's items of a global batch. Args: int64 [batch_size], see `BucketOrder.batches`."""
        share = slice(self.first_index, self.first_index + self.batch_size // self.data_size)
        items: list[int] = indices[share].tolist()
        return list(zip(items, epochs[share].tolist(), strict=True)) if self.with_epoch else items

    def _check_batch_size(self, data_size: int) -> None:
        """Raise ValueError if the batches cannot be divided."""
        if self.batch_size % data_size:
            raise ValueError(
                f"batch_size={self.batch_size} is the global batch and must be a multiple of data_parallel={data_size}"
            )

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch's order; the next iteration begins with its first batch."""
        self.enter(epoch)
        self._set_by_user = True

    def enter(self, epoch: int) -> None:
        """Select an epoch as `set_epoch` does, but not as a choice of the user, see `take_user_position`."""
        self._epoch, self._start, self._yielded = epoch, 0, 0

    def seek(self, step: int) -> None:
        """Start the next iteration at the batch of this step, counted from 0 over all epochs.

        Raises: ValueError: `step` is negative.
        """
        self._epoch, self._start = self.order.epoch_at(step)
        self._yielded = self._start
        self._set_by_user = True

    def take_user_position(self) -> bool:
        """Return whether `seek`, `set_epoch` or `load_state_dict` was called since the last call, and reset this."""
        was_set, self._set_by_user = self._set_by_user, False
        return was_set

    @property
    def epoch(self) -> int:
        """Current epoch, counted from 0."""
        return self._epoch

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the position in the data order.

        Args:
            step: number of consumed batches over all epochs. None: number of yielded batches, which is too high when
                DataLoader workers or the Trainer prefetch.
        """
        position = self.order.batches_before(self._epoch) + self._yielded if step is None else step
        return {"step": position, **{name: getattr(self, name) for name in self._order_settings}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position of a `state_dict`, at any data-parallel degree.

        Raises: ValueError: the order differs (seed, shuffle, batch size, number of samples, ... changed).
        """
        for name in self._order_settings:
            if state.get(name) != getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)} differs from the checkpoint's {name}={state.get(name)}: "
                    "the data order cannot be continued; use the checkpoint's value or start a new run"
                )
        self.seek(int(state["step"]))


class AnnouncedEpochs:
    """Select the epochs of a sampler as Lightning announces them.

    The Trainer calls `loader.batch_sampler.sampler.set_epoch` with its number of completed epochs, Fabric with the
    number of times that the loader was iterated over. A position set by the user is kept: the epoch announced next
    gets that position, and later ones are counted from its epoch.
    """

    def __init__(self, sampler: OrderSampler) -> None:
        self._sampler, self._offset = sampler, 0

    def set_epoch(self, epoch: int) -> None:
        """Select an epoch, counted by Lightning."""
        if self._sampler.take_user_position():
            self._offset = self._sampler.epoch - epoch
        elif self._sampler.epoch != epoch + self._offset:
            self._sampler.enter(epoch + self._offset)


class GlobalBatchSampler(OrderSampler):
    """Yield this data rank's contiguous slice of each global batch.

    The global batches depend only on (seed, epoch), so training sees the same samples at every degree of parallelism:
    one process, eight context ranks, or eight data ranks. An incomplete last batch is dropped. Pass the sampler to a
    DataLoader as `batch_sampler`; all ranks of a context group use the same `data_rank`.

    Args:
        num_samples: number of samples in the data set.
        batch_size: global batch size, over all data ranks.
        seed: seed of the order.
        shuffle: True for a random order in each epoch, False for index order.
        data_rank: index of this rank's context group (`strategy.data_rank`).
        data_size: number of context groups (`strategy.data_size`).
    Raises: ValueError: batch_size exceeds num_samples or is not a multiple of data_size, or data_rank is out of range.

    Examples:
        >>> [batch for batch in GlobalBatchSampler(7, 4, shuffle=False, data_rank=1, data_size=2)]
        [[2, 3]]
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        data_rank: int = 0,
        data_size: int = 1,
    ) -> None:
        if not 1 <= batch_size <= num_samples:
            raise ValueError(f"batch_size={batch_size} must be from 1 to the {num_samples} samples of the data set")
        order = BucketOrder((np.arange(num_samples),), batch_size, seed, leftovers="drop", shuffle=shuffle)
        super().__init__(order, data_rank=data_rank, data_size=data_size)


class EndlessBatches(Sampler[list[Any]]):
    """Yield the batches of a sampler from its current position, epoch after epoch, without end.

    Args: sampler: a `GlobalBatchSampler` or `BucketBatchSampler`.
    """

    sharded_by_data_rank = True

    def __init__(self, sampler: OrderSampler) -> None:
        self.order_sampler = sampler  # not `sampler`: Lightning would announce its epochs to it

    @override
    def __iter__(self) -> Iterator[list[Any]]:
        while True:
            yield from self.order_sampler
            self.order_sampler.enter(self.order_sampler.epoch + 1)


class UnsizedBatches(WrappedSampler):
    """Hide the length of a batch sampler with epochs of different lengths.

    Lightning's Trainer reads a loader's length once, and would cut longer epochs to the length of the first one. If a
    loader has no length, the Trainer trains until its iteration ends.
    """

    @override
    def __len__(self) -> int:
        """Raise TypeError: the length differs between epochs."""
        raise TypeError(
            "this loader has no fixed length, because its epochs have different numbers of batches; "
            "len(sampler) is the number of batches of the sampler's current epoch"
        )

    @override
    def __iter__(self) -> Iterator[Any]:
        return iter(self.order)
