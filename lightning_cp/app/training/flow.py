"""Implement flow matching with straight paths (Lipman et al., arXiv:2210.02747; Liu et al., arXiv:2209.03003)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_cp.training.noise import sample_dropped, sample_noise, sample_times


@dataclass(frozen=True)
class FlowBatch:
    """Inputs and target of one step: the point at `times` on the line from data (0) to noise (1), and its velocity."""

    noisy: Tensor
    times: Tensor
    labels: Tensor
    velocity: Tensor


@dataclass(frozen=True)
class FlowMatching:
    """The flow-matching objective and its keyed random draws.

    Args:
        seed: seed of the run.
        num_classes: number of classes; labels are 0 to num_classes - 1, and num_classes means "no condition".
        drop_probability: probability of dropping a sample's label, for CFG.
    """

    seed: int
    num_classes: int
    drop_probability: float = 0.1

    def batch(self, pixels: Tensor, labels: Tensor, *, step: int, first_index: int = 0) -> FlowBatch:
        """Draw noise, times and label drop-out for a share of the global batch with first row `first_index`."""
        rows = {"seed": self.seed, "step": step, "first_index": first_index}
        noise = sample_noise(pixels.shape, **rows, device=pixels.device, dtype=pixels.dtype)
        times = sample_times(len(labels), **rows, device=pixels.device)
        dropped = sample_dropped(len(labels), self.drop_probability, **rows, device=labels.device)
        mix = times.to(pixels.dtype).view(-1, *([1] * (pixels.dim() - 1)))
        return FlowBatch(
            noisy=(1 - mix) * pixels + mix * noise,
            times=times,
            labels=torch.where(dropped, self.num_classes, labels),
            velocity=noise - pixels,
        )

    def loss(self, model: nn.Module, batch: FlowBatch) -> Tensor:
        """Return the mean squared error of the velocity; every rank computes it over whole samples."""
        predicted = model(batch.noisy, batch.times, batch.labels)
        return nn.functional.mse_loss(predicted.float(), batch.velocity.float())
