"""Divide the samples of a latent cache into training data and held-out data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Subset

from lightning_cp.finetune.families import Sample
from lightning_cp.finetune.latent_cache import LatentData
from lightning_cp.finetune.validation import HeldOutData, split_validation


class LatentSubset(Subset[Sample]):
    """Some items of a `LatentData`, with what a sampler and a loader need."""

    def __init__(self, data: LatentData, items: Sequence[int]) -> None:
        super().__init__(data, items)
        self.collate = data.collate
        buckets, tokens = data.buckets, data.tokens
        self.buckets = [buckets[item] for item in items]
        self.tokens = [tokens[item] for item in items]

    def __getitem__(self, item: Any) -> Sample:
        number, epoch = item if isinstance(item, (tuple, list)) else (item, 0)
        return self.dataset[self.indices[number], epoch]

    def __getitems__(self, items: list[Any]) -> list[Sample]:
        """Return several items: `Subset` has this method, and DataLoader calls it."""
        return [self[item] for item in items]


def hold_out(data: LatentData, count: int, *, seed: int = 0) -> tuple[LatentSubset, HeldOutData | None]:
    """Divide data into training samples and samples for validation; all samples of a file are on the same side.

    Args:
        data: data of a cache.
        count: least number of samples to hold out; 0: none.
        seed: see `split_validation`.
    Returns: the training data, and the held-out data (None without any).
    Raises: ValueError: `count` is not less than the number of files.
    """
    items: Sequence[int] = range(len(data))
    if not count:
        return LatentSubset(data, items), None
    kept, rest = split_validation([row.source for row in data.cache.rows], count, seed=seed)
    rows = set(kept)
    held_out = HeldOutData(data.cache, rest, lengths=data.lengths)
    return LatentSubset(data, [item for item in items if data.row_of(item) in rows]), held_out
