"""Flow matching along straight lines (Lipman et al., arXiv:2210.02747; Liu et al., arXiv:2209.03003)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_cp.training.noise import sample_dropped, sample_noise, sample_times


@dataclass(frozen=True)
class FlowBatch:
    """What one step trains on: the point at `times` on the way from data (0) to noise (1), and the velocity there."""

    noisy: Tensor
    times: Tensor
    labels: Tensor
    velocity: Tensor


@dataclass(frozen=True)
class FlowMatching:
    """The objective, and the keyed draws that it needs.

    Args:
        seed: of the run.
        num_classes: labels 0 to num_classes - 1; the label num_classes means "no condition".
        drop_probability: of training a sample without its label, for guidance.
    """

    seed: int
    num_classes: int
    drop_probability: float = 0.1

    def batch(self, pixels: Tensor, labels: Tensor, *, step: int, first_index: int = 0) -> FlowBatch:
        """Draws noise, times and drop-out for the rows from `first_index` of the global batch of this step."""
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
        """Mean squared error of the velocity, over the whole sample on every rank."""
        predicted = model(batch.noisy, batch.times, batch.labels)
        return nn.functional.mse_loss(predicted.float(), batch.velocity.float())
