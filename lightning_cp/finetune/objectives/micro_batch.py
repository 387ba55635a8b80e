"""Hold a data rank's samples of a global batch, and divide them into micro-batches, for gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.comm.background import numbers_on
from lightning_cp.finetune.families import Family, StoredBatch
from lightning_cp.finetune.families.latents import main_latents
from lightning_cp.finetune.objectives.objective import Objective
from lightning_cp.training.noise import FirstIndex, indices_of


@dataclass(frozen=True)
class BatchPart:
    """Samples of one size.

    Args:
        stored: the samples.
        indices: their positions in the global batch.
        weights: factor of each sample's loss.
        scale: factor of the sum of their losses, see `DrawnSample`.
    """

    stored: StoredBatch
    indices: tuple[int, ...]
    weights: tuple[float, ...]
    scale: float


class DividedBatch:
    """Parts of a batch that pass the model one after the other; see `DividedBatchSampler`.

    It is not a list, because Lightning's precision plugins cast the tensors in lists and dataclasses. Lightning still
    moves it to the device, because it has a method `to`.

    Args:
        parts: the parts.
        degree: context degree of the step, see `lightning_cp.data.divided_sampler`.
        seed: seed of random numbers such as dropout, the same on all ranks that share the samples.
    """

    def __init__(self, parts: Sequence[BatchPart], degree: int, seed: int) -> None:
        self.parts, self.degree, self.seed = list(parts), degree, seed

    def __len__(self) -> int:
        """Return the number of samples, without repeated ones."""
        return sum(len(part.indices) for part in self.parts if part.scale)

    def to(self, device: torch.device | str, **_: Any) -> DividedBatch:
        """Return a copy on a device, see `StoredBatch.to`."""
        return self._map(lambda stored: stored.to(device))

    def pin_memory(self) -> DividedBatch:
        """Return a copy in pinned memory. PyTorch's DataLoader calls it."""
        return self._map(StoredBatch.pin_memory)

    def _map(self, function: Callable[[StoredBatch], StoredBatch]) -> DividedBatch:
        return DividedBatch(
            [replace(part, stored=function(part.stored)) for part in self.parts], self.degree, self.seed
        )


@dataclass(frozen=True)
class MicroBatch:
    """Samples that pass the model together. The sum of their losses' gradients is the gradient of the rank's batch.

    Noise and times depend on the index of a sample in the global batch, so the size of micro-batches changes nothing.

    Args:
        objective, family, step: see `Objective.loss`.
        part: the samples.
        is_last: no other micro-batch of the step follows.
    """

    objective: Objective
    family: Family
    part: BatchPart
    step: int
    is_last: bool

    @property
    def stored(self) -> StoredBatch:
        """The samples' tensors."""
        return self.part.stored

    @property
    def share(self) -> float:
        """Part of the rank's loss: the number of its samples divided by that of the rank's batch.

        In a divided batch: by the mean number of samples of a data group.
        """
        return self.part.scale * len(self.part.indices)

    def loss(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the sums of the weighted losses and of sigma, float32 scalars; both are multiplied by `part.scale`."""
        stored, indices = self.part.stored, self.part.indices
        clean = main_latents(self.family.clean(stored))
        times = self.objective.times(self.family, clean, step=self.step, first_index=indices)
        losses = self.objective.sample_losses(
            model, self.family, stored, step=self.step, first_index=indices, times=times
        )
        if any(weight != 1 for weight in self.part.weights):
            losses = losses * numbers_on(losses.device, self.part.weights, losses.dtype)
        sigma = self.objective.sigma(self.family, times)
        return losses.sum() * self.part.scale, sigma.float().sum() * self.part.scale


def micro_batches(
    objective: Objective,
    family: Family,
    batch: StoredBatch | DividedBatch,
    *,
    size: int | None,
    step: int,
    first_index: FirstIndex,
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a rank's batch; the last one may have fewer samples.

    Args:
        batch: samples of one size, or a divided batch: each of its parts is a micro-batch.
        size: largest number of samples of a micro-batch; None: all samples. A divided batch has its own sizes.
        first_index: see `Objective.loss`; a divided batch has its own indices.
        objective, family, step: see `Objective.loss`.
    """
    parts = batch.parts if isinstance(batch, DividedBatch) else list(_parts(batch, size or len(batch), first_index))
    for number, part in enumerate(parts, start=1):
        yield MicroBatch(objective, family, part, step=step, is_last=number == len(parts))


def _parts(stored: StoredBatch, size: int, first_index: FirstIndex) -> Iterator[BatchPart]:
    samples = len(stored)
    indices = tuple(indices_of(first_index, samples))
    for start in range(0, samples, size):
        chosen = indices[start : start + size]
        part = stored.samples(start, start + len(chosen))
        yield BatchPart(part, chosen, (1.0,) * len(chosen), scale=1 / samples)
