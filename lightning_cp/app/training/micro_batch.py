"""Compute the loss of some samples of a step, whose gradients are accumulated."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from lightning_cp.families import Family, StoredBatch
from lightning_cp.objectives import Objective


@dataclass(frozen=True)
class MicroBatch:
    """Samples that pass the model together. The sum of their losses' gradients is the gradient of the rank's batch.

    Noise and times depend on the index of a sample in the global batch, so the size of micro-batches changes nothing.

    Args:
        objective, family, stored, step, first_index: see `Objective.loss`; `stored` has the samples of this one only.
        share: its part of the samples of the rank's batch.
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
        key = {"step": self.step, "first_index": self.first_index}
        times = self.objective.times(self.family, self.family.clean(self.stored), **key)
        losses = self.objective.sample_losses(model, self.family, self.stored, **key, times=times)
        sigma = self.objective.sigma(self.family, times)
        return losses.mean() * self.share, sigma.float().mean() * self.share
