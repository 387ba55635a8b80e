"""Compute the loss of held-out samples at fixed times: the same number at every degree of parallelism."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_cp.data.sampler import bucket_members
from lightning_cp.finetune.experts import experts_in
from lightning_cp.finetune.families import Family, Sample, StoredBatch, collate
from lightning_cp.finetune.families.latents import main_latents
from lightning_cp.finetune.latent_cache import LatentCache
from lightning_cp.finetune.objectives import ExpertFlowMatching, Objective
from lightning_cp.finetune.settings import QUANTILES
from lightning_cp.training.modes import evaluating
from lightning_cp.training.ranks import DataShard, Ranks


class HeldOutData:
    """Rows of a cache for validation: each row once, whatever its `repeats`, always with its first caption.

    Args:
        cache: the cache.
        rows: indices of the rows in `cache.rows`, for instance from `split_validation`.
        lengths: see `LatentData`.
    """

    def __init__(self, cache: LatentCache, rows: Sequence[int], *, lengths: Sequence[int] = ()) -> None:
        self.cache, self.rows, self.lengths = cache, tuple(rows), tuple(lengths)
        self._text = cache.family().text

    @property
    def buckets(self) -> list[tuple[int, int, int]]:
        """Size (frames, height, width) of every sample."""
        rows = [self.cache.rows[i] for i in self.rows]
        return [(row.frames, row.height, row.width) for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> Sample:
        return self.cache.sample(self.rows[item], caption=0)

    def collate(self, samples: Sequence[Sample]) -> StoredBatch:
        """Join samples to a batch, without the empty caption: validation drops no captions."""
        return collate(samples, self._text, lengths=self.lengths)


@dataclass(frozen=True)
class ValidationResult:
    """Losses of a validation set, equal on all ranks.

    Attributes:
        loss: mean of `by_quantile`.
        by_quantile: mean loss of the samples by quantile of the training times.
        samples: number of samples.
    """

    loss: float
    by_quantile: dict[float, float]
    samples: int


class Validation:
    """Evaluate the training loss on held-out samples, at fixed quantiles of the training times.

    All evaluations use the same noise: the noise of a sample depends only on (seed of the objective, quantile, its
    number in the validation set ordered by bucket), and differs from the noise of all training steps. Captions are
    not dropped, and latents are the mode of the VAE's distribution. The result therefore does not depend on the number
    of ranks or the batch size, up to rounding. With several experts, each quantile is evaluated with the expert that is
    trained on it.

    Args:
        data: held-out samples, the same on every rank: `HeldOutData`, or a data set with its methods.
        family: family of the transformer.
        objective: objective of the training.
        quantiles: quantiles of the training times, in (0, 1); 0.9 is a high noise level.
        batch_size: samples per forward on each data rank.
    Raises: ValueError: there are no samples, or a setting is out of range.
    """

    def __init__(
        self,
        data: Any,
        family: Family,
        objective: Objective,
        *,
        quantiles: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9),
        batch_size: int = 1,
    ) -> None:
        self.data, self.family, self.quantiles, self.batch_size = data, family, tuple(map(float, quantiles)), batch_size
        if not len(data):
            raise ValueError("the validation set has no samples: hold out at least 1, or train without validation")
        if not QUANTILES.passes(self.quantiles):
            raise ValueError(f"quantiles={list(quantiles)} must be {QUANTILES.describe()}")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        self.objective = replace(objective, cond_dropout=0.0, sample_posterior=False)
        self._buckets = [members.tolist() for members in bucket_members(data.buckets).values()]

    @torch.no_grad()
    def losses(self, transformer: nn.Module, ranks: Ranks, data_shard: DataShard) -> ValidationResult:
        """Return the mean losses of the validation set, with the transformer in eval mode.

        With the Trainer, call it within `trainer.precision_plugin.forward_context()`: the transformer of a
        LightningModule does not apply the precision itself. A transformer from `fabric.setup` does.

        Args:
            transformer: the module that training calls, context-parallel or not, also with sharded weights.
            ranks: Fabric, or `TrainerRanks(trainer)`.
            data_shard: `DataShard.of(strategy)`.
        Ranks: all. Every rank runs the same number of forwards, and one all-reduce.
        Raises:
            RuntimeError: the ranks have different validation sets.
            ValueError: the objective is for several experts, and the transformer is one model.
        """
        sums = torch.zeros(len(self.quantiles) + 1, dtype=torch.float64)  # the last one counts samples
        with evaluating(transformer):
            for numbers in self._by_expert(transformer):
                for first, members, is_counted in self._batches(data_shard):
                    stored = self.data.collate([self.data[i] for i in members]).to(ranks.device)
                    clean = main_latents(self.family.clean(stored))
                    for k in numbers:
                        p = self.quantiles[k]
                        times = self.objective.times_at(self.family, clean, p)
                        losses = self.objective.sample_losses(
                            transformer, self.family, stored, step=_step(p), first_index=first, times=times
                        )
                        if is_counted:  # not multiplied by 0: nan stays nan
                            sums[k] += losses.double().sum().cpu()
                    if is_counted and 0 in numbers:
                        sums[-1] += len(members)
        *totals, count = ranks.all_reduce(sums.to(ranks.device), reduce_op="sum").tolist()
        if not count or count % len(self.data):  # a multiple: with a plain strategy, every rank has all the data
            raise RuntimeError(
                f"the ranks evaluated {count:.0f} validation samples, expected {len(self.data)}: all ranks must have "
                "the same validation set"
            )
        by_quantile = {p: total / count for p, total in zip(self.quantiles, totals, strict=True)}
        return ValidationResult(sum(by_quantile.values()) / len(by_quantile), by_quantile, len(self.data))

    def _by_expert(self, transformer: nn.Module) -> Iterator[list[int]]:
        """Yield the numbers of the quantiles that one expert evaluates, and select this expert; all without experts.

        An expert evaluates all of its quantiles before the next one is selected, which may copy weights to the device.
        """
        if not isinstance(self.objective, ExpertFlowMatching):
            yield list(range(len(self.quantiles)))
            return
        experts = experts_in(transformer)
        if experts is None:
            raise ValueError(
                f"the objective is for the experts {', '.join(self.objective.ranges)}, but "
                f"{type(transformer).__name__} has none: pass the transformer of FineTuning"
            )
        trained = experts.active
        expert_of = [self.objective.expert_of(p)[0] for p in self.quantiles]
        for name in dict.fromkeys(expert_of):
            experts.select(name)
            yield [k for k, one in enumerate(expert_of) if one == name]
        experts.select(trained)

    def _batches(self, shard: DataShard) -> Iterator[tuple[int, list[int], bool]]:
        """Yield this rank's batches: number of the first sample, the samples, and whether their losses are added.

        Each bucket is divided evenly over the data ranks. They all have the same number of batches, because a forward
        may contain collectives of all ranks (sharded weights, buffers of DDP). If a rank has no sample left, it repeats
        one and does not add its loss.
        """
        start = 0  # number of the bucket's first sample; a batch has consecutive numbers
        for members in self._buckets:
            low, high = (len(members) * rank // shard.size for rank in (shard.rank, shard.rank + 1))
            largest_share = -(-len(members) // shard.size)
            for k in range(low, low + largest_share, self.batch_size):
                batch = members[k : min(k + self.batch_size, high)]
                yield (start + k, batch, True) if batch else (start, members[:1], False)
            start += len(members)


def split_validation(sources: Sequence[str], count: int, seed: int) -> tuple[list[int], list[int]]:
    """Split samples into a training and a validation set, with all samples of a source in the same set.

    The order in which sources are held out depends only on the seed and their names. If sources are added later, none
    moves from the training set to the validation set; the last ones of the validation set may move to the training set.

    Args:
        sources: source of every sample, for instance the file that a clip is from.
        count: least number of samples to hold out. There are more if the last source has several samples.
        seed: seed of the order.
    Returns: indices of the training samples and of the validation samples, ascending.
    Raises: ValueError: count is less than 1, or not less than the number of sources.
    """
    names = sorted(set(sources))
    if not 1 <= count < len(names):
        raise ValueError(
            f"count={count} held-out samples must be at least 1 and less than the number of sources, {len(names)}"
        )
    samples = Counter(sources)
    held_out, held = set[str](), 0
    for name in sorted(names, key=lambda name: (_hash(seed, name), name)):
        if held >= count:
            break
        held_out.add(name)
        held += samples[name]
    training = [i for i, source in enumerate(sources) if source not in held_out]
    return training, [i for i, source in enumerate(sources) if source in held_out]


def _hash(seed: int, name: str) -> bytes:
    return hashlib.blake2b(f"{seed}:{name}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _step(p: float) -> int:
    """Return a step that training never has: negative, and different for every quantile."""
    return -int(np.float64(p).view(np.int64))
