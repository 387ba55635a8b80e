"""Raise on all ranks when the data of some ranks end before those of the others."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.data.peer_batches import is_on_all_ranks, length_or_none
from lightning_cp.errors import DataError
from lightning_cp.sample_groups import world_control

_REMEDY = (
    "All ranks must take the same number of steps: pad or drop batches, or limit them (limit_train_batches, "
    "limit_val_batches; a fixed number of steps in your own loop)"
)


def with_equal_batches(loader: Any, data_rank: int, *, always: bool) -> Any:
    """Return a loader that raises on all ranks if the ranks have different numbers of batches.

    Lengths are compared when iteration begins. A loader without a length, or of an iterable data set, whose length is a
    promise only, is compared before each batch.

    Args:
        loader: the DataLoader, or another iterable. It is not modified.
        data_rank: index of this rank's context group.
        always: compare in each iteration; False: only while gradients are enabled, because an evaluation with whole
            weights may have a different number of batches on each rank.
    Ranks: the whole world, here and whenever iteration begins.
    """
    inner = getattr(loader, "batch_sampler", None) or getattr(loader, "sampler", None)
    if not dist.is_initialized() or dist.get_world_size() == 1 or is_on_all_ranks(inner):
        return loader
    kind, comparison = type(loader), _Comparison(data_rank, always, world_control())
    try:
        compared = copy.copy(loader)
        # The class of a loader decides how Lightning treats it, so it gets a subclass of its class.
        names = {"__module__": kind.__module__, "__iter__": lambda self: comparison.iterate(self, kind.__iter__(self))}
        compared.__class__ = type(kind.__name__, (kind,), names)
    except TypeError:  # a generator, for example, cannot be copied
        return loader
    return compared


class _Comparison:
    """Compare the numbers of batches between ranks."""

    def __init__(self, data_rank: int, always: bool, group: dist.ProcessGroup) -> None:
        self._data_rank, self._always, self._group, self._world = data_rank, always, group, dist.group.WORLD

    def iterate(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator of the loader that compares. In a later world, which has other ranks, it does not."""
        if dist.group.WORLD is not self._world or not (self._always or torch.is_grad_enabled()):
            return batches
        length = length_or_none(loader)
        by_index = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if length is None or not by_index:
            return self._each(batches)
        self.lengths(length)
        return batches

    def lengths(self, length: int) -> None:
        """Raise DataError on all ranks if loaders have different lengths. Ranks: the whole world."""
        by_rank = all_gather_ints([length, self._data_rank], group=self._group)
        shortest, longest = min(by_rank), max(by_rank)
        if shortest[0] != longest[0]:
            raise DataError(
                f"the data loader has {shortest[0]} batches in data group {shortest[1]}, but {longest[0]} in data "
                f"group {longest[1]}. {_REMEDY}"
            )

    def is_next(self, found: bool, count: int) -> None:
        """Raise DataError on all ranks if only some ranks have a next batch. Ranks: the whole world."""
        by_rank = all_gather_ints([int(found), self._data_rank], group=self._group)
        ended, more = min(by_rank), max(by_rank)
        if ended[0] != more[0]:
            raise DataError(
                f"the data loader ended after {count} batches in data group {ended[1]}, but data group {more[1]} has "
                f"more. {_REMEDY}"
            )

    def _each(self, batches: Iterator[Any]) -> Iterator[Any]:
        count, nothing = 0, object()
        while True:
            batch = next(batches, nothing)
            self.is_next(batch is not nothing, count)
            if batch is nothing:
                return
            count += 1
            yield batch
