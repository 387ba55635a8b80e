"""Give the ranks of a context group the same batches, and data groups different ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler
from typing_extensions import override

from lightning_cp.comm.agree import gather_objects
from lightning_cp.data.random_state import get_random_state, is_same_state, seeded, set_random_state
from lightning_cp.data.sampler import EndlessBatches, OrderSampler, UnsizedBatches, WrappedSampler
from lightning_cp.errors import DataError
from lightning_cp.mesh.groups import MeshGroups

Order = Iterable[Any]
_FIRST_CHUNK, _LAST_CHUNK = 16, 4096  # entries per broadcast; each chunk is twice as large as the previous one
_COMPARED = 8  # batches (or indices) compared between data groups
_RECORDER = "_IndexBatchSamplerWrapper"  # matched by name: it is in lightning.pytorch, which Fabric does not import
_SAME_ON_ALL_RANKS = (OrderSampler, EndlessBatches, UnsizedBatches)


class EqualDraws(WrappedSampler):
    """Iterate over a sampler with global random states that depend on a seed and the epoch only.

    Args: order: a finite sampler. outer: the DistributedSampler that divides it, with the seed and the epoch.
    """

    def __init__(self, order: Any, outer: DistributedSampler[Any]) -> None:
        super().__init__(order)
        self.outer = outer

    @override
    def __iter__(self) -> Iterator[Any]:
        with seeded(self.outer.seed, self.outer.epoch):
            return iter(list(self.order))


def draw_equally(sampler: Any) -> None:
    """Change a sampler that Lightning wraps to divide it: its parts on all data groups are of the same order."""
    wrapped: Any = getattr(sampler, "dataset", None)  # of Lightning's wrapper: the entries of the user's sampler
    wraps = isinstance(sampler, DistributedSampler) and hasattr(wrapped, "_sampler")
    if wraps and not isinstance(wrapped._sampler, EqualDraws):
        wrapped._sampler = EqualDraws(wrapped._sampler, sampler)


class GroupBatches(WrappedSampler):
    """Yield every `data_size`-th batch of a batch sampler, starting with batch `data_rank`.

    Use it for a custom batch sampler, such as one that groups samples by size. Each data group gets different batches
    of the same epoch. A loader that the strategy sets up divides the batches of the first rank of the world, on all
    ranks. Elsewhere, give the sampler the same seed on all ranks.

    Args:
        batches: a batch sampler, or another iterable of batches.
        data_rank: index of this rank's context group (`strategy.data_rank`).
        data_size: number of context groups (`strategy.data_size`).
        repeat: if the last round has fewer than `data_size` batches, fill it with the first batches, so that all data
            groups take the same number of steps. With False, data groups may differ by one batch.
    Raises: ValueError: `data_rank` is not in 0 to data_size - 1.

    Examples:
        >>> [list(GroupBatches([[0, 1], [2], [3, 4]], rank, 2)) for rank in range(2)]
        [[[0, 1], [3, 4]], [[2], [0, 1]]]
    """

    sharded_by_data_rank = True

    def __init__(self, batches: Iterable[Any], data_rank: int, data_size: int, *, repeat: bool = True) -> None:
        if data_size < 1 or not 0 <= data_rank < data_size:
            raise ValueError(f"data_rank={data_rank} must be from 0 to data_size - 1, with data_size={data_size} >= 1")
        super().__init__(batches)
        self.data_rank, self.data_size, self.repeat = data_rank, data_size, repeat

    @override
    def __len__(self) -> int:
        """Number of batches of this data group. Raises: TypeError: the batch sampler has no length."""
        count = super().__len__()
        return -(-count // self.data_size) if self.repeat else len(range(self.data_rank, count, self.data_size))

    @override
    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.order)
        first: list[Any] = []
        while True:
            one_round = list(islice(batches, self.data_size))
            first = first or one_round
            if self.repeat and one_round:
                while len(one_round) < self.data_size:
                    one_round += first[: self.data_size - len(one_round)]
            if len(one_round) <= self.data_rank:
                return
            yield one_round[self.data_rank]


def is_custom(batch_sampler: object) -> bool:
    """Return True for a batch sampler without an inner index sampler: Lightning cannot shard it."""
    if isinstance(batch_sampler, _SAME_ON_ALL_RANKS):  # their `sampler` is no index sampler
        return True
    known = (type(None), BatchSampler)
    return not isinstance(batch_sampler, known) and not hasattr(batch_sampler, "sampler")


def is_on_all_ranks(order: object) -> bool:
    """Return True for a sampler of lightning_cp, which has the same number of batches on all ranks."""
    return isinstance(order, _SAME_ON_ALL_RANKS)


def prepare_loader(loader: DataLoader[Any], groups: MeshGroups, *, divide: bool) -> DataLoader[Any]:
    """Return a loader that yields the same batches on all ranks of a context group.

    The first rank of the group defines the order. With several data groups, a loader that is not sharded yet is
    handled in one of two ways. With a custom batch sampler and `divide` set, its batches are divided over data
    groups. Otherwise its order is compared between data groups when iteration starts with gradients enabled.

    The samplers of lightning_cp are already sharded. If their epochs have different lengths, the length is hidden (see
    `UnsizedBatches`).

    Args:
        loader: the DataLoader built by the user or Lightning. It is not modified; it is returned if nothing is needed.
        groups: the process groups of the strategy.
        divide: True to shard samplers over data groups (Lightning's `use_distributed_sampler`).
    Raises: ValueError: a DistributedSampler has a num_replicas or rank that does not match the data groups.
    """
    source = _source(loader)
    _check_replicas(loader.sampler, groups)
    if isinstance(source, OrderSampler) and not source.order.has_equal_epochs:
        return reordered(loader, UnsizedBatches)
    if isinstance(source, _SAME_ON_ALL_RANKS):
        return loader
    batches = _unwrapped(loader.batch_sampler)
    if groups.data_size > 1:
        for sampler in (loader.sampler, getattr(batches, "sampler", None)):
            draw_equally(sampler)
    if groups.data_size > 1 and isinstance(batches, GroupBatches):
        # Data groups draw different numbers, but must divide the same batches.
        return reordered(loader, lambda _: _divided(batches.order, groups, repeat=batches.repeat))
    if groups.data_size > 1 and not _is_divided(loader):
        if divide and is_custom(batches):
            repeat = loader.batch_sampler is batches
            return reordered(loader, lambda order: _divided(order, groups, repeat=repeat))
        return reordered(
            loader, lambda order: DifferentOrders(_same_on_peers(order, groups), groups, length_or_none(loader.dataset))
        )
    if _same_on_peers(source, groups) is source:
        return loader
    return reordered(loader, lambda order: _same_on_peers(order, groups))


class FirstRanksOrder(WrappedSampler):
    """Iterate over a sampler on the first rank of a group and broadcast its output to the other ranks.

    Only the first rank runs the sampler, so only its global generators advance. Within one context group, the other
    ranks then receive its random states, so that all ranks still draw the same numbers. If `group` spans several
    context groups, their states may differ: the first rank restores its states instead, and every rank draws one
    number.

    A sampler with a length is not read to its end before the consumer reaches this end: many samplers draw random
    numbers once more there, and a private generator must have the same state as in one process.

    Args:
        order: a sampler of indices, or a batch sampler.
        group: ranks that get the same order. None: only this rank.
        shares_states: True if these ranks are one context group.
    Ranks: all ranks of `group` iterate together. Raises: DataError: on all ranks, if the sampler fails on the first.
    """

    def __init__(self, order: Order, group: dist.ProcessGroup | None, *, shares_states: bool = True) -> None:
        super().__init__(order)
        self.group, self.shares_states = group, shares_states

    @override
    def __iter__(self) -> Iterator[Any]:
        if self.group is None:
            yield from self.order
            return
        is_first = dist.get_rank(self.group) == 0
        entries = iter(self.order) if is_first else iter(())
        # Do not prefetch from a sampler with a state_dict: its saved position would be ahead of training.
        size, last = (1, 1) if hasattr(self.order, "state_dict") else (_FIRST_CHUNK, _LAST_CHUNK)
        remaining = length_or_none(self.order) if is_first else None
        while True:
            before = get_random_state() if is_first else {}
            message: list[Any] = [None]
            if is_first:
                size = min(size, max(remaining, 1)) if remaining is not None else size
                chunk, error = _next_chunk(entries, size, type(self.order).__name__)
                remaining = None if remaining is None else remaining - len(chunk)
                after = get_random_state()
                message = [(chunk, size, error, None if is_same_state(before, after) else after)]
            dist.broadcast_object_list(message, group=self.group, group_src=0)
            chunk, size, error, drawn = message[0]
            if drawn is not None and self.shares_states:
                set_random_state(drawn)
            elif drawn is not None:
                if is_first:
                    set_random_state(before)
                torch.empty((), dtype=torch.int64).random_()  # advance the generator, so that the next epoch differs
            yield from chunk
            if error is not None:
                raise DataError(f"a sampler failed on the first rank of its group: {error}")
            if len(chunk) < size:
                return
            size = min(2 * size, last)


class DifferentOrders(WrappedSampler):
    """Iterate over a sampler after checking that data groups have different orders.

    Args:
        order: a sampler of indices, or a batch sampler.
        groups: the process groups of the strategy.
        length: length of the data set; None if it has none.
    Ranks: all ranks of the world iterate together, with gradients enabled on all ranks or on none.
    Raises: DataError: on every rank, if gradients are enabled and all data groups begin with the same indices of a
        data set of the same length.
    """

    def __init__(self, order: Order, groups: MeshGroups, length: int | None) -> None:
        super().__init__(order)
        self.groups, self.length = groups, length

    @override
    def __iter__(self) -> Iterator[Any]:
        if not torch.is_grad_enabled():  # evaluating the same data on every rank is correct
            yield from self.order
            return
        order = iter(self.order)
        first = list(islice(order, 1 if hasattr(self.order, "state_dict") else _COMPARED))
        gathered = gather_objects((first, self.length), dist.group.WORLD)
        if first and all(other == gathered[0] for other in gathered):
            raise DataError(
                f"all {self.groups.data_size} data groups read the same batches: they begin with {str(first[0])[:60]}. "
                "Leave use_distributed_sampler=True, or wrap the batch sampler: "
                "lightning_cp.data.GroupBatches(batch_sampler, strategy.data_rank, strategy.data_size). If the "
                "same indices are different samples on each data group, set sharded_by_data_rank = True on the data set"
            )
        yield from chain(first, order)


def reordered(loader: DataLoader[Any], wrap: Callable[[Order], Order]) -> DataLoader[Any]:
    """Copy a loader and replace its sampler or batch sampler.

    Args:
        wrap: takes the old sampler (or batch sampler) and returns the new one.
    """
    copied = copy.copy(loader)
    attributes = copied.__dict__  # bypass DataLoader.__setattr__, which rejects these attributes
    attributes["_iterator"] = None
    if loader.batch_sampler is None:
        attributes["sampler"] = wrap(loader.sampler)
        return copied
    outer: Any = loader.batch_sampler
    inner = _unwrapped(outer)
    replaced = _with_order(inner, wrap)
    if inner is not outer:
        recorder = copy.copy(outer)
        recorder._batch_sampler = replaced
        replaced = recorder
    attributes["batch_sampler"] = replaced
    if loader.sampler is getattr(loader.batch_sampler, "sampler", None):
        attributes["sampler"] = attributes["batch_sampler"].sampler
    return copied


def _divided(order: Order, groups: MeshGroups, *, repeat: bool) -> GroupBatches:
    """Divide the batches of the world's first rank over data groups. Args: repeat: see `GroupBatches`."""
    order = FirstRanksOrder(order, dist.group.WORLD, shares_states=False)
    return GroupBatches(order, groups.data_rank, groups.data_size, repeat=repeat)


def _with_order(batch_sampler: Any, wrap: Callable[[Order], Order]) -> Order:
    if type(batch_sampler) is not BatchSampler:
        return wrap(batch_sampler)  # not a copy: the user may seek or set the epoch of the original
    replaced: BatchSampler = copy.copy(batch_sampler)
    replaced.sampler = wrap(batch_sampler.sampler)
    return replaced


def _unwrapped(batch_sampler: Any) -> Any:
    """Return the batch sampler inside Lightning's wrapper that records prediction indices, if it is wrapped."""
    return batch_sampler._batch_sampler if type(batch_sampler).__name__ == _RECORDER else batch_sampler


def _source(loader: DataLoader[Any]) -> Order:
    """Return the sampler that defines the order: a custom batch sampler, otherwise the index sampler."""
    batch_sampler = _unwrapped(loader.batch_sampler)
    if batch_sampler is None:
        return loader.sampler
    return batch_sampler.sampler if type(batch_sampler) is BatchSampler else batch_sampler


def _check_replicas(sampler: object, groups: MeshGroups) -> None:
    """Check a DistributedSampler against the data groups. Raises: ValueError: see `prepare_loader`."""
    if not isinstance(sampler, DistributedSampler):
        return
    actual, valid = (sampler.num_replicas, sampler.rank), (groups.data_size, groups.data_rank)
    if actual != valid:
        raise ValueError(
            f"{type(sampler).__name__}(num_replicas={actual[0]}, rank={actual[1]}) gives ranks of one context group "
            f"different samples: use num_replicas=strategy.data_size ({valid[0]}) and rank=strategy.data_rank "
            f"({valid[1]}), or no DistributedSampler"
        )


def _is_divided(loader: DataLoader[Any]) -> bool:
    batch_sampler = _unwrapped(loader.batch_sampler)
    holders = (loader, loader.dataset, loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    return any(isinstance(x, DistributedSampler) or getattr(x, "sharded_by_data_rank", False) for x in holders)


def _same_on_peers(order: Order, groups: MeshGroups) -> Order:
    """Broadcast the order from the first rank of the context group, unless all ranks have the same order anyway."""
    if groups.context is None or type(order) in (SequentialSampler, DistributedSampler):
        return order
    return FirstRanksOrder(order, groups.context)


def length_or_none(x: Any) -> int | None:
    """Return `len(x)`, or None if x has no length."""
    try:
        return len(x)
    except (TypeError, NotImplementedError):
        return None


def _next_chunk(order: Iterator[Any], size: int, name: str) -> tuple[list[Any], str | None]:
    """Read up to `size` entries. Returns: the entries, and the error message if the sampler failed, otherwise None."""
    chunk: list[Any] = []
    try:
        chunk.extend(islice(order, size))
    except Exception as error:
        return chunk, f"{type(error).__name__} in {name}: {error}"
    return chunk, None
