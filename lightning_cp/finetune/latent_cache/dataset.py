"""Use a cache as a data set of torch."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_cp.data.keyed_random import RandomStream, keyed_generator
from lightning_cp.finetune.families import Sample, StoredBatch, collate
from lightning_cp.finetune.latent_cache.cache import LatentCache
from lightning_cp.finetune.media.limits import EPOCH_ITEMS


def text_lengths(longest: int) -> tuple[int, ...]:
    """Return lengths to pad texts to, for `LatentData(lengths=...)`: 64, 128, ... up to `longest`.

    A text is then padded to 64 positions, or to less than twice its length.
    """
    doubled = [64 << n for n in range(max(0, longest - 1).bit_length()) if 64 << n < longest]
    return (*doubled, longest)


class LatentData(Dataset[Sample]):
    """Samples of a cache, with one of their captions chosen at random in each epoch.

    A row with `repeats` of n is n items. The caption depends only on (seed, epoch, item), so every degree of
    parallelism and every number of workers sees the same ones. A sampler that yields pairs (item, epoch) gets new
    captions in each epoch; with plain items the captions are those of epoch 0.

    Args:
        cache: the cache.
        seed: seed of the captions.
        repeats: number of times that an epoch shows every sample, in addition to each row's `repeats`.
        lengths: numbers of positions that `collate` pads masked text to, such as (64, 128, 256, 512). Empty: pad to the
            longest text of the batch, which is the least work without `torch.compile`, and with it in one process,
            because one graph with dynamic shapes serves all lengths. Context-parallel blocks are compiled for each
            length: give few lengths, and media in few buckets.
    Raises: ValueError: `repeats` or a length is not valid.
    """

    def __init__(self, cache: LatentCache, *, seed: int = 0, repeats: int = 1, lengths: Sequence[int] = ()) -> None:
        if repeats < 1:
            raise ValueError(f"repeats={repeats} must be at least 1")
        self.cache, self.seed, self.lengths = cache, seed, tuple(lengths)
        counts = [row.repeats * repeats for row in cache.rows]
        if sum(counts) > EPOCH_ITEMS:
            raise ValueError(
                f"repeats={repeats} gives an epoch of {sum(counts)} items from {len(counts)} samples: at most "
                f"{EPOCH_ITEMS} are possible"
            )
        self._row_of = np.repeat(np.arange(len(counts)), counts)
        self._text = cache.family().text  # here, not in workers: a spawned process has no registered families
        if any(type(length) is not int or not 1 <= length <= self._text.length for length in self.lengths):
            raise ValueError(
                f"lengths={self.lengths} must be integers from 1 to {self._text.length}, the text length of "
                f"{cache.index.family}, or empty"
            )
        self._empty: Sample | None = None

    def __len__(self) -> int:
        """Return the number of items of an epoch."""
        return len(self._row_of)

    def row_of(self, item: int) -> int:
        """Return the index of an item's row in `cache.rows`."""
        return int(self._row_of[item])

    @property
    def tokens(self) -> list[int]:
        """Number of tokens of every item."""
        tokens = [row.tokens for row in self.cache.rows]
        return [tokens[row] for row in self._row_of]

    @property
    def buckets(self) -> list[tuple[int, int, int]]:
        """Size (frames, height, width) of every item, for a sampler that draws batches of one size."""
        rows = self.cache.rows
        sizes = [(row.frames, row.height, row.width) for row in rows]
        return [sizes[row] for row in self._row_of]

    @override
    def __getitem__(self, item: int | tuple[int, int]) -> Sample:
        """Return an item. Args: item: its number, or (number, epoch). Raises: IndexError: there is no such item."""
        number, epoch = item if isinstance(item, tuple | list) else (item, 0)
        number, count = operator.index(number), len(self)
        if not -count <= number < count:
            raise IndexError(f"item {number} is out of range: the data set has {count} items")
        number %= count
        row = int(self._row_of[number])
        captions = self.cache.rows[row].captions
        drawn = keyed_generator(self.seed, RandomStream.CAPTION, step=int(epoch), index=number)
        return self.cache.sample(row, int(drawn.integers(len(captions))))

    def collate(self, samples: Sequence[Sample]) -> StoredBatch:
        """Join samples to a batch, with the text of the empty caption: the `collate_fn` of a DataLoader."""
        if self._empty is None:
            self._empty = self.cache.empty_text
        return collate(samples, self._text, self._empty, lengths=self.lengths)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_empty": None}
