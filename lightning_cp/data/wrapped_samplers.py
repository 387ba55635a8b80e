"""Samplers that wrap another sampler: divide its batches over data groups, or let all groups draw the same order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DistributedSampler, Sampler
from typing_extensions import override

from lightning_cp.data.random_state import seeded


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
