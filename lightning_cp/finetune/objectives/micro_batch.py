"""Divide a step's batch into micro-batches, for gradient accumulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_cp.finetune.families import Family, StoredBatch
from lightning_cp.finetune.families.latents import main_latents
from lightning_cp.finetune.objectives.objective import Objective


@dataclass(frozen=True)
class MicroBatch:
    """Samples that pass the model together. The sum of their losses' gradients is the gradient of the rank's batch.

    Noise and times depend on the index of a sample in the global batch, so the size of micro-batches changes nothing.

    Args:
        objective, family, stored, step, first_index: see `Objective.loss`; `stored` has its samples only.
        share: number of its samples divided by the number of samples of the rank's batch.
        is_last: no other micro-batch of the step follows.
    """

    objective: Objective
    family: Family
    stored: StoredBatch
    step: int
    first_index: int
    share: float
    is_last: bool

    def loss(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the loss and the mean sigma, float32 scalars; both are multiplied by `share`."""
        clean = main_latents(self.family.clean(self.stored))
        times = self.objective.times(self.family, clean, step=self.step, first_index=self.first_index)
        losses = self.objective.sample_losses(
            model, self.family, self.stored, step=self.step, first_index=self.first_index, times=times
        )
        sigma = self.objective.sigma(self.family, times)
        return losses.mean() * self.share, sigma.float().mean() * self.share


def micro_batches(
    objective: Objective, family: Family, stored: StoredBatch, *, size: int | None, step: int, first_index: int
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a rank's batch; the last one may have fewer samples.

    Args:
        size: largest number of samples of a micro-batch; None: all samples.
        objective, family, stored, step, first_index: see `Objective.loss`.
    """
    size, samples = size or len(stored), len(stored)
    for start in range(0, samples, size):
        part = stored.samples(start, min(start + size, samples))
        yield MicroBatch(
            objective,
            family,
            part,
            step=step,
            first_index=first_index + start,
            share=len(part) / samples,
            is_last=start + size >= samples,
        )
