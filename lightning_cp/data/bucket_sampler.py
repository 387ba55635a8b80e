"""Load batches from a data set with samples of several sizes: their sampler, their loader, and endless loaders."""

from __future__ import annotations

import hashlib
import logging
import traceback
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_cp.data.random_state import seeds_of_loader
from lightning_cp.data.sampler import (
    LEFTOVERS,
    BucketOrder,
    EndlessBatches,
    Indices,
    OrderSampler,
    UnsizedBatches,
    bucket_members,
)
from lightning_cp.errors import DataError

_log = logging.getLogger("lightning.fabric.bucket_batches")  # child of a logger with a handler
_LISTED = 32  # buckets in a report


class BucketBatchSampler(OrderSampler):
    """Yield this data rank's contiguous slice of each global batch; a batch holds samples of one bucket only.

    Use it for data of several sizes: give samples of equal shape the same bucket key. The global batches depend only on
    (seed, epoch), so training sees the same samples at every degree of parallelism, also after a resume. Batches of all
    buckets are mixed in a random order. Buckets are numbered in the order in which they first appear.

    Pass it to a DataLoader as `batch_sampler`; all ranks of a context group use the same `data_rank`. In Fabric, set
    `use_distributed_sampler=False` in `setup_dataloaders`. With `leftovers="carry"`, epochs have different numbers of
    batches, but Lightning's Trainer reads the length of a loader once. The strategies of lightning_cp therefore hide
    the length from it; with another strategy, wrap the sampler in `EndlessBatches` and set `max_steps`.

    Args:
        buckets: bucket key of each sample, in index order.
        batch_size: global batch size, over all data ranks.
        seed: seed of the order.
        leftovers: samples of a bucket that do not fill a batch at the end of an epoch are used in the next epoch
            ("carry"), left out ("drop"), or completed with samples of the same epoch ("repeat").
        shuffle: False for index order within a bucket, one bucket after another.
        with_epoch: yield (index, epoch) pairs instead of indices, for data sets with items that depend on the epoch. A
            sample that is carried over keeps the epoch that it comes from.
        data_rank: index of this rank's context group (`strategy.data_rank`).
        data_size: number of context groups (`strategy.data_size`).
    Raises: ValueError: an unknown `leftovers`, fewer samples than one batch (unless "repeat"), a bucket with fewer
        samples than one batch ("drop"), batch_size is not a multiple of data_size, or data_rank is out of range.

    A batch from a bucket with fewer than `batch_size` samples holds a sample more than once ("carry": from different
    epochs). This is logged as a warning, and the result of `report` as information, both on rank 0.

    Examples:
        >>> sampler = BucketBatchSampler(["wide", "tall", "wide", "wide", "tall"], 2, shuffle=False)
        >>> list(sampler)
        [[0, 2], [1, 4]]
        >>> sampler.set_epoch(1)
        >>> list(sampler)
        [[3, 0], [2, 3], [1, 4]]
    """

    _order_settings = ("mixed", *OrderSampler._order_settings, "leftovers", "assignment")
    mixed = False  # a batch has samples of one size

    def __init__(
        self,
        buckets: Iterable[Hashable],
        batch_size: int,
        *,
        seed: int = 0,
        leftovers: str = "carry",
        shuffle: bool = True,
        with_epoch: bool = False,
        data_rank: int = 0,
        data_size: int = 1,
    ) -> None:
        members = bucket_members(buckets)
        self.leftovers = leftovers
        self.bucket_sizes: dict[Hashable, int] = {key: len(indices) for key, indices in members.items()}
        _check_sizes(self.bucket_sizes, batch_size, leftovers)
        order = BucketOrder(tuple(members.values()), batch_size, seed, leftovers, shuffle)
        super().__init__(order, data_rank=data_rank, data_size=data_size, with_epoch=with_epoch)
        self.assignment = digest(order.members)
        if data_rank == 0 and not (dist.is_initialized() and dist.get_rank()):
            self._log()

    def report(self) -> str:
        """Describe the buckets: samples, batches of epoch 0, and what happens to samples that do not fill a batch."""
        size, total = self.batch_size, self.order.batches_before(1)
        lines = [f"{self.num_samples} samples, {total} batches of {size} in epoch 0, by size:"]
        for key, count in list(self.bucket_sizes.items())[:_LISTED]:
            lines.append(f"  bucket {key}: {count} samples, {count / size:.4g} batches{self._fate(count)}")
        others = list(self.bucket_sizes.values())[_LISTED:]
        if others:
            lines.append(f"  {len(others)} more buckets: {sum(others)} samples")
        return "\n".join(lines)

    def _fate(self, count: int) -> str:
        """Describe what happens to a bucket's leftovers."""
        left = count % self.batch_size
        if not left:
            return ""
        return {
            "carry": f"; the last {left} of an epoch go into a batch of the next epoch",
            "drop": f"; the last {left} of each epoch are dropped",
            "repeat": f"; the last {left} are completed with {self.batch_size - left} others of the same epoch",
        }[self.leftovers]

    def _log(self) -> None:
        _log.info(self.report())
        small = {key: count for key, count in self.bucket_sizes.items() if count < self.batch_size}
        if small:
            _log.warning(
                f"buckets with fewer samples than a batch of {self.batch_size}: {_listed(small)}. Their batches hold a "
                "sample more than once; to avoid this, use a smaller batch_size or fewer buckets"
            )


def _check_sizes(sizes: dict[Hashable, int], batch_size: int, leftovers: str) -> None:
    """Check the settings against the buckets. Raises: ValueError: see `BucketBatchSampler`."""
    if leftovers not in LEFTOVERS:
        raise ValueError(f"leftovers={leftovers!r} must be one of {', '.join(map(repr, LEFTOVERS))}")
    total = sum(sizes.values())
    if batch_size < 1 or not total:
        raise ValueError(f"batch_size={batch_size} and the number of samples, {total}, must be at least 1")
    if batch_size > total and leftovers != "repeat":
        raise ValueError(
            f"batch_size={batch_size} must be at most the {total} samples of the data set: lower batch_size, or set "
            "leftovers='repeat' to fill batches with repeated samples"
        )
    small = {key: count for key, count in sizes.items() if count < batch_size}
    if small and leftovers == "drop":
        raise ValueError(
            f"leftovers='drop' would drop every sample of the buckets with fewer samples than batch_size={batch_size}: "
            f"{_listed(small)}. Lower batch_size, use fewer buckets, or set leftovers='carry'"
        )


def _listed(sizes: dict[Hashable, int]) -> str:
    names = [f"{key} ({count} samples)" for key, count in list(sizes.items())[:_LISTED]]
    return ", ".join([*names, "..."] if len(sizes) > _LISTED else names)


def digest(members: tuple[Indices, ...]) -> str:
    """Return a hash of the bucket number of every sample."""
    numbers = np.concatenate([np.full(len(indices), bucket) for bucket, indices in enumerate(members)])
    in_index_order = numbers[np.argsort(np.concatenate(members))]
    return hashlib.blake2b(in_index_order.astype("<i8").tobytes(), digest_size=8).hexdigest()


class EndlessLoader(DataLoader[Any]):
    """An endless DataLoader: the end of iteration is an error, not the end of training.

    A loop over a DataLoader ends on StopIteration, also when a data set raises it by mistake (`next` without a
    default, perhaps in a worker). Training would then end on one rank while the other ranks wait for it.

    With `EndlessBatches` as batch sampler, each iteration continues after the last batch that the previous one
    returned, also if workers had prefetched more, unless the sampler's position was set in between. Lightning's Trainer
    starts a new iteration in each of its epochs (`limit_train_batches`).

    Raises: DataError: the batches have ended.
    """

    _next_step: int | None = None  # after the batches returned so far

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        first = self._place_sampler()
        batches = super().__iter__()
        count = 0
        while True:
            try:
                batch = next(batches)
            except StopIteration as end:
                raise DataError(f"the data loader ended after {count} batches of this run: {_cause(end)}") from end
            count += 1
            self._next_step = first + count
            yield batch

    def _place_sampler(self) -> int:
        """Set the sampler to the next batch. Returns: its step; 0 for a sampler without steps."""
        if not isinstance(self.batch_sampler, EndlessBatches):
            return 0
        sampler = self.batch_sampler.order_sampler
        if not sampler.take_user_position() and self._next_step is not None:
            sampler.seek(self._next_step)
            sampler.take_user_position()
        return int(sampler.state_dict()["step"])


def _cause(end: StopIteration) -> str:
    """Describe the place where StopIteration was raised, and the fix."""
    frame = traceback.extract_tb(end.__traceback__)[-1]
    origin = f"StopIteration was raised in {frame.name}, {frame.filename}:{frame.lineno}"
    if isinstance(end.value, str) and end.value.startswith("Caught StopIteration"):  # worker traceback, as text
        lines = [line.strip() for line in end.value.splitlines() if line.strip().startswith("File ")]
        origin = f"StopIteration was raised in a worker: {lines[-1]}"
    return f"{origin}; the data set must return a sample for every index, and its sampler must not end"


class BucketedData(Protocol):
    """Data set with samples of several sizes."""

    @property
    def buckets(self) -> Sequence[Hashable]:
        """Key of each sample; samples with equal keys can be in one batch."""

    def collate(self, samples: list[Any], /) -> Any:
        """Build a batch from a list of samples (DataLoader's `collate_fn`)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class DataRanks(Protocol):
    """The part of a strategy of lightning_cp that says which share of the data a rank loads."""

    @property
    def data_rank(self) -> int:
        """Index of this rank's context group."""

    @property
    def data_size(self) -> int:
        """Number of context groups."""


def bucket_loader(
    data: BucketedData,
    *,
    batch_size: int,
    ranks: DataRanks | None = None,
    seed: int = 0,
    leftovers: str = "carry",
    with_epoch: bool = False,
    endless: bool = True,
    start_step: int = 0,
    num_workers: int = 0,
    **settings: Any,
) -> DataLoader[Any]:
    """Create a loader of this data rank's share of batches that hold samples of one bucket each.

    The batches depend on `seed` and the step only, not on the number of ranks. To resume, pass the number of completed
    steps as `start_step`.

    Args:
        data: data set with attributes `buckets` and `collate`.
        batch_size: global batch size, over all data ranks.
        ranks: the strategy (or another object with `data_rank` and `data_size`). None: one process loads all the data.
        seed: seed of the order and of the workers.
        leftovers, with_epoch: see `BucketBatchSampler`.
        endless: True for a loader without end, for a number of steps (Trainer's `max_steps`). False: each iteration
            is one epoch; the strategies of lightning_cp and Fabric select the epochs.
        start_step: batches to skip, counted over all epochs.
        num_workers, settings: further arguments of DataLoader.
    Raises:
        TypeError: `data` has no `buckets` or no `collate`, or `ranks` has no data ranks.
        ValueError: `buckets` does not have one key per sample, a sample has a weight in the loss (`weights`), or see
            `BucketBatchSampler`.
    """
    _check_data(data)
    data_rank, data_size = data_shard_of(ranks)
    sampler = BucketBatchSampler(
        data.buckets,
        batch_size,
        seed=seed,
        leftovers=leftovers,
        with_epoch=with_epoch,
        data_rank=data_rank,
        data_size=data_size,
    )
    if start_step:
        sampler.seek(start_step)
    batches: Any = sampler if sampler.order.has_equal_epochs else UnsizedBatches(sampler)
    kind: type[DataLoader[Any]] = EndlessLoader if endless else DataLoader
    return kind(
        data,  # type: ignore[arg-type]  # any object with a length and items by index
        batch_sampler=EndlessBatches(sampler) if endless else batches,
        collate_fn=data.collate,
        num_workers=num_workers,
        **{**seeds_of_loader(seed, data_rank), **settings},
    )


def _check_data(data: BucketedData) -> None:
    for name, meaning in (("buckets", "the key of each sample"), ("collate", "a function from samples to a batch")):
        if not hasattr(data, name):
            raise TypeError(f"{type(data).__name__} must have an attribute `{name}`: {meaning}")
    if any(weight != 1 for weight in getattr(data, "weights", ())):
        raise ValueError(
            f"{type(data).__name__} has samples with a weight in the loss, which these batches do not carry: use "
            "lightning_cp.finetune.divided_loader(mixed=False)"
        )
    if len(data.buckets) != len(data):
        raise ValueError(
            f"{type(data).__name__}.buckets has {len(data.buckets)} keys for {len(data)} samples: it must have one "
            "key per sample"
        )


def data_shard_of(ranks: DataRanks | None) -> tuple[int, int]:
    """Return (data rank, number of data ranks). Raises: TypeError: `ranks` has none."""
    if ranks is None:
        return 0, 1
    if not (hasattr(ranks, "data_rank") and hasattr(ranks, "data_size")):
        raise TypeError(
            f"ranks={type(ranks).__name__} must have `data_rank` and `data_size`: pass a strategy of lightning_cp, or "
            "leave ranks out in a single process"
        )
    return int(ranks.data_rank), int(ranks.data_size)
