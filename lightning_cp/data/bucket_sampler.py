"""Sample batches from a data set with samples of several sizes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Hashable, Iterable

import numpy as np
import torch.distributed as dist

from lightning_cp.data.bucket_order import LEFTOVERS, BucketOrder, Indices, bucket_members
from lightning_cp.data.sampler import OrderSampler

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
