"""Divide samples of a cache into training and held-out data, and global batches over data groups by their work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Subset
from typing_extensions import override

from lightning_cp.data import EndlessBatches, EndlessLoader
from lightning_cp.data.bucket_sampler import DataRanks, data_shard_of
from lightning_cp.data.divided_sampler import BatchDivision, DividedBatchSampler, DrawnSample, Shard, StepDegrees
from lightning_cp.data.keyed_random import hashed_seed
from lightning_cp.data.random_state import seeds_of_loader
from lightning_cp.finetune.families import Sample, StoredBatch
from lightning_cp.finetune.latent_cache import LatentData
from lightning_cp.finetune.objectives.micro_batch import BatchPart, DividedBatch
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


class SizedSamples(Protocol):
    """Data set with samples of several sizes, such as `LatentData`."""

    @property
    def buckets(self) -> Sequence[Any]:
        """Key of each sample; samples with equal keys have equal shapes."""
        ...

    @property
    def tokens(self) -> Sequence[int]:
        """Number of tokens of each sample."""
        ...

    def collate(self, samples: list[Any], /) -> StoredBatch:
        """Join samples of one size to a batch."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Sample: ...


class DividedData(Dataset[Any]):
    """The samples that a `DividedBatchSampler` draws from a data set.

    Args: data: a data set that takes pairs (item, epoch).
    """

    def __init__(self, data: SizedSamples) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    @override
    def __getitem__(self, drawn: DrawnSample) -> tuple[DrawnSample, Sample]:
        return drawn, self.data[drawn.item, drawn.epoch]

    def collate(self, samples: Sequence[tuple[DrawnSample, Sample]]) -> DividedBatch:
        """Join the samples of each part: the `collate_fn` of a DataLoader."""
        parts: dict[int, list[tuple[DrawnSample, Sample]]] = {}
        for drawn, sample in samples:
            parts.setdefault(drawn.part, []).append((drawn, sample))
        names = [(drawn.item, drawn.epoch, drawn.position) for drawn, _ in samples]
        seed = hashed_seed(repr(names))
        return DividedBatch([self._part(part) for part in parts.values()], samples[0][0].degree, seed)

    def _part(self, samples: Sequence[tuple[DrawnSample, Sample]]) -> BatchPart:
        drawn = [one for one, _ in samples]
        stored = self.data.collate([sample for _, sample in samples])
        return BatchPart(stored, tuple(x.position for x in drawn), tuple(x.weight for x in drawn), drawn[0].scale)


def divided_loader(
    data: SizedSamples,
    *,
    batch_size: int,
    ranks: DataRanks | None = None,
    seed: int = 0,
    mixed: bool = True,
    attention_tokens: float = 18_432,
    micro_batch_size: int | None = None,
    reduction: str = "samples",
    start_step: int = 0,
    num_workers: int = 0,
    **settings: Any,
) -> DataLoader[Any]:
    """Create an endless loader of batches that are divided over the data groups by the work of their samples.

    `FineTuning` trains on it: give it to `Trainer.fit`. The global batches, their noise and their losses depend on
    `seed` and the step only, not on the number of ranks. To resume, pass the number of completed steps as `start_step`.

    Args:
        data: data set such as `LatentData`. If it has `weights`, they are factors of the samples' losses.
        batch_size: global batch size, over all data ranks.
        ranks: the strategy; its `degrees` choose the context degree of each step. None: one process loads all the data.
        seed: seed of the order and of the workers.
        mixed: True: a batch holds samples of all sizes. False: samples of one size.
        attention_tokens, reduction: see `BatchDivision`.
        micro_batch_size: largest number of samples of one size that pass the model together; None: all. Must be 1 for
            a family with `one_per_call`, such as MiniMax-H3.
        start_step: batches to skip, counted over all epochs.
        num_workers, settings: further arguments of DataLoader.
    Raises:
        TypeError: `ranks` has no data ranks.
        ValueError: see `BatchDivision` and `DividedBatchSampler`.
    """
    division = BatchDivision(
        data.buckets,
        data.tokens,
        attention_tokens,
        part_size=micro_batch_size,
        reduction=reduction,
        weights=getattr(data, "weights", None),
    )
    sampler = DividedBatchSampler(division, batch_size, step_degrees(ranks), mixed=mixed, seed=seed)
    if start_step:
        sampler.seek(start_step)
    divided = DividedData(data)
    return EndlessLoader(
        divided,
        batch_sampler=EndlessBatches(sampler),
        collate_fn=divided.collate,
        num_workers=num_workers,
        **{**seeds_of_loader(seed, sampler.data_rank), **settings},
    )


def needs_division(data: object, ranks: Any) -> bool:
    """Return whether batches must be divided: samples have weights in the loss, or steps have degrees."""
    return any(weight != 1 for weight in getattr(data, "weights", ())) or bool(step_degrees(ranks).by_tokens)


def set_degree(batch: object, strategy: Any) -> None:
    """Select the context degree of the forwards and backwards of a batch; with None, that of the strategy.

    If steps have different degrees, the batch also seeds torch's generators: ranks that share a sample at one degree,
    and not at another, would otherwise draw different dropout.
    """
    if not hasattr(strategy, "use_degree"):
        return
    if not isinstance(batch, DividedBatch):
        strategy.use_degree(None)
        return
    strategy.use_degree(batch.degree)
    if strategy.step_degrees.by_tokens:
        torch.manual_seed(batch.seed)


def step_degrees(ranks: Any) -> StepDegrees:
    """Return the degrees of a strategy, or one degree for an object without them. Raises: TypeError: no data ranks."""
    degrees: StepDegrees | None = getattr(ranks, "step_degrees", None)
    return StepDegrees.fixed(Shard(*data_shard_of(ranks))) if degrees is None else degrees
