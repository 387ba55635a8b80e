"""Faulty data sets for recipes: data.dataset._target_=tests.faults.data.SpoiltDigits."""

import os
from collections.abc import Iterator

from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_cp.recipes.digits.data import Digits


class SpoiltDigits(Digits):
    """The digits, until one rank (or, with -1, each) has loaded so many samples.

    Args:
        fault: nan: pixels are NaN in the batch after that; stop: StopIteration is raised.
        after: number of samples that are right.
        count: number of samples that are NaN.
        rank: number of the rank that does wrong.
    """

    def __init__(self, fault: str, after: int, rank: int = -1, count: int = 1, held_out: int = 0) -> None:
        super().__init__(held_out)
        self._fault, self._after, self._count, self._given = fault, after, count, 0
        self._spoils = rank in (-1, int(os.environ.get("RANK", "0")))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self._given += 1
        pixels, label = super().__getitem__(index)
        is_due = self._spoils and self._after < self._given <= self._after + self._count
        if is_due and self._fault == "stop":
            raise StopIteration
        return (pixels * float("nan") if is_due else pixels), label


class LyingDigits(Digits):
    """Says that it has another number of samples on rank 1."""

    def __len__(self) -> int:
        return 1797 - 100 * int(os.environ.get("RANK", "0"))


class StreamedDigits(IterableDataset[int]):
    """No samples by index."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))
