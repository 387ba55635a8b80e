"""Divide the batches of any batch sampler over data groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from typing_extensions import override

from lightning_cp.data.wrapped_sampler import WrappedSampler


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
