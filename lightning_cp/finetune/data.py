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
        buckets, tokens, weights = data.buckets, data.tokens, data.weights
        self.buckets = [buckets[item] for item in items]
        self.tokens = [tokens[item] for item in items]
        self.weights = [weights[item] for item in items]

    def __getitem__(self, item: Any) -> Sample:
        number, epoch = item if isinstance(item, (tuple, list)) else (item, 0)
        return self.dataset[self.indices[number], epoch]

    def __getitems__(self, items: list[Any]) -> list[Sample]:
        """Return several items: `Subset` has this method, and DataLoader calls it."""
        return [self[item] for item in items]


def hold_out(data: LatentData, count: int, *, seed: int = 0) -> tuple[LatentSubset, HeldOutData | None]:
    """Divide data into training samples and samples for validation; all samples of a file are on the same side.

    Pictures for prior preservation are not held out.

    Args:
        data: data of a cache.
        count: least number of samples to hold out; 0: none, or the validation set of the data.
        seed: see `split_validation`.
    Returns: the training data, and the held-out data (None without any).
    Raises: ValueError: `count` is not less than the number of files, or the data have a validation set.
    """
    rows, items = data.cache.rows, range(len(data))
    held_out = [i for i, row in enumerate(rows) if row.use == "validation"]
    if held_out and count:
        raise ValueError(f"count={count} must be 0: the data have a validation set of {len(held_out)} samples")
    if count:
        trained = [i for i, row in enumerate(rows) if row.use == "train"]
        _, chosen = split_validation([rows[i].source for i in trained], count, seed=seed)
        held_out = [trained[i] for i in chosen]
    files = {rows[i].source for i in held_out}
    training = LatentSubset(data, [item for item in items if rows[data.row_of(item)].source not in files])
    return training, HeldOutData(data.cache, held_out, lengths=data.lengths) if held_out else None
