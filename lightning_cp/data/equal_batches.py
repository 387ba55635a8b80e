"""Raise on all ranks when the data of some ranks end before those of the others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.data.peer_batches import is_on_all_ranks, length_or_none
from lightning_cp.errors import DataError
from lightning_cp.mesh.groups import cached
from lightning_cp.mesh.sample_groups import world_control

_UNKNOWN = -1
_REMEDY = (
    "All ranks must take the same number of steps: pad or drop batches, or limit them (limit_train_batches, "
    "limit_val_batches; a fixed number of steps in your own loop)"
)


def with_equal_batches(loader: Any, *, always: bool, taken: Callable[[int], int] | None = None) -> Any:
    """Return a loader that raises on all ranks if some of them take fewer batches than others.

    Lengths are compared here, and again if one has changed when iteration begins. Loaders without a length are compared
    before each batch; so are loaders of iterable data sets, because their length may be wrong.

    Args:
        loader: the DataLoader, or another iterable. It is not modified.
        always: compare in each iteration; False: only while gradients are enabled, because an evaluation with whole
            weights may have a different number of batches on each rank.
        taken: number of batches that a loop takes from a loader of a length. If these differ, iteration raises with the
            first batch. None: unknown; it raises after the last batch that all ranks have.
    Ranks: the whole world, here and in each iteration of a loader without a length.
    """
    samplers = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    if not dist.is_initialized() or dist.get_world_size() == 1 or any(map(is_on_all_ranks, samplers)):
        return loader
    kind, comparison = type(loader), _Comparison(loader, always, taken)
    try:
        compared = copy.copy(loader)
        # The class of a loader decides how Lightning treats it, so it gets a subclass of its class.
        names = {"__module__": kind.__module__, "__iter__": lambda self: comparison.iterate(self, kind.__iter__(self))}
        compared.__class__ = type(kind.__name__, (kind,), names)
    except TypeError:  # a generator, for example, cannot be copied
        return loader
    return compared


class _Comparison:
    """Compare the numbers of batches of one loader between ranks."""

    def __init__(self, loader: Any, always: bool, taken: Callable[[int], int] | None) -> None:
        self._always, self._taken, self._world = always, taken, dist.group.WORLD
        self._group, self._number = world_control("batches"), next(cached("loaders", lambda: count(1)))
        self._lengths = self._gather(_length(loader))

    def iterate(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator of the loader that compares. In a later world, which has other ranks, it does not.

        It raises with a batch, because the Trainer hides what is raised before.
        """
        if dist.group.WORLD is not self._world or not (self._always or torch.is_grad_enabled()):
            return batches
        return self._one_by_one(batches) if _UNKNOWN in self._lengths else self._by_length(loader, batches)

    def _by_length(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        if _length(loader) != self._lengths[dist.get_rank()]:
            self._lengths = self._gather(_length(loader))
        lengths = self._lengths if self._taken is None else [self._taken(length) for length in self._lengths]
        least, most = _extremes(lengths)
        error = f"the data loader has {lengths[least]} batches on rank {least}, but {lengths[most]} on rank {most}"
        if lengths[least] == lengths[most]:
            yield from batches
            return
        if self._taken is None:
            rank_zero_warn(f"{error}: this is an error after {lengths[least]} batches. {_REMEDY}")
            yield from islice(batches, lengths[least])
        raise DataError(f"{error}. {_REMEDY}")

    def _one_by_one(self, batches: Iterator[Any]) -> Iterator[Any]:
        taken, nothing = 0, object()
        while True:
            batch = next(batches, nothing)
            ended, more = _extremes(has_batch := self._gather(int(batch is not nothing)))
            if has_batch[ended] != has_batch[more]:
                raise DataError(
                    f"the data loader ended after {taken} batches on rank {ended}, but rank {more} has more. {_REMEDY}"
                )
            if batch is nothing:
                return
            taken += 1
            yield batch

    def _gather(self, value: int) -> list[int]:
        """Return the values of all ranks. Raises: DataError: the ranks read different loaders (on all of them)."""
        by_rank = all_gather_ints([self._number, value], group=self._group)
        for rank, (number, _) in enumerate(by_rank):
            if number != by_rank[0][0]:
                raise DataError(
                    f"rank 0 reads data loader {by_rank[0][0]}, but rank {rank} data loader {number} (in the order of "
                    "their set-up). All ranks must read the same loaders, in the same order; to read one on some ranks "
                    "only, use torch.no_grad()"
                )
        return [value for _, value in by_rank]


def _length(loader: Any) -> int:
    length = None if isinstance(getattr(loader, "dataset", None), IterableDataset) else length_or_none(loader)
    return _UNKNOWN if length is None or not isinstance(loader, DataLoader) else length


def _extremes(values: list[int]) -> tuple[int, int]:
    """Return the first ranks with the least and with the largest value."""
    return values.index(min(values)), values.index(max(values))
