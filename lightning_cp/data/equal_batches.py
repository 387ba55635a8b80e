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


def with_equal_batches(loader: Any, *, always: bool) -> Any:
    """Return a loader that raises on all ranks if the ranks have different numbers of batches.

    Lengths are compared when iteration begins. Loaders without a length, and loaders of iterable data sets (whose
    length may be wrong), are compared before each batch.

    Args:
        loader: the DataLoader, or another iterable. It is not modified.
        always: compare in each iteration; False: only while gradients are enabled, because an evaluation with whole
            weights may have a different number of batches on each rank.
    Ranks: the whole world, here and whenever iteration begins.
    """
    samplers = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    if not dist.is_initialized() or dist.get_world_size() == 1 or any(map(is_on_all_ranks, samplers)):
        return loader
    kind, comparison = type(loader), _Comparison(always, world_control())
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

    def __init__(self, always: bool, group: dist.ProcessGroup) -> None:
        self._always, self._group, self._world = always, group, dist.group.WORLD

    def iterate(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator of the loader that compares. In a later world, which has other ranks, it does not.

        It raises with the first batch, because the Trainer hides what is raised before.
        """
        if dist.group.WORLD is not self._world or not (self._always or torch.is_grad_enabled()):
            return batches
        length = length_or_none(loader)
        by_index = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        return self._by_length(batches, length) if by_index and length is not None else self._one_by_one(batches)

    def _by_length(self, batches: Iterator[Any], length: int) -> Iterator[Any]:
        lengths, least, most = self._gather(length)
        if least != most:
            raise DataError(
                f"the data loader has {lengths[least]} batches on rank {least}, but {lengths[most]} on rank {most}. "
                f"{_REMEDY}"
            )
        yield from batches

    def _one_by_one(self, batches: Iterator[Any]) -> Iterator[Any]:
        count, nothing = 0, object()
        while True:
            batch = next(batches, nothing)
            _, ended, more = self._gather(int(batch is not nothing))
            if ended != more:
                raise DataError(
                    f"the data loader ended after {count} batches on rank {ended}, but rank {more} has more. {_REMEDY}"
                )
            if batch is nothing:
                return
            count += 1
            yield batch

    def _gather(self, number: int) -> tuple[list[int], int, int]:
        """Return the numbers of all ranks, and the first ranks with the least and with the largest one."""
        numbers = [n for (n,) in all_gather_ints([number], group=self._group)]
        return numbers, numbers.index(min(numbers)), numbers.index(max(numbers))
