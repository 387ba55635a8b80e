"""DataLoaders: an endless one, and one for a data set with samples of several sizes."""

from __future__ import annotations

import traceback
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data import DataLoader

from lightning_cp.data.bucket_sampler import BucketBatchSampler
from lightning_cp.data.sampler import EndlessBatches, UnsizedBatches
from lightning_cp.data.workers import seeds_of_loader
from lightning_cp.errors import DataError


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
        ...

    def collate(self, samples: list[Any], /) -> Any:
        """Build a batch from a list of samples (DataLoader's `collate_fn`)."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class DataRanks(Protocol):
    """The part of a strategy of lightning_cp that says which share of the data a rank loads."""

    @property
    def data_rank(self) -> int:
        """Index of this rank's context group."""
        ...

    @property
    def data_size(self) -> int:
        """Number of context groups."""
        ...


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
