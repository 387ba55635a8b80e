"""Let all data groups draw the same order where Lightning divides a user's sampler: their random states differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DistributedSampler
from typing_extensions import override

from lightning_cp.data.random_state import seeded
from lightning_cp.data.wrapped_sampler import WrappedSampler


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
