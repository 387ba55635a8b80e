"""Samples of a flow, by integrating it from noise to data with guidance."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


@torch.no_grad()
def integrate_flow(
    model: nn.Module | Callable[[Tensor, Tensor, Tensor], Tensor],
    noise: Tensor,
    labels: Tensor,
    *,
    null_label: int,
    guidance: float = 2.0,
    num_steps: int = 20,
    between: Callable[[], None] = lambda: None,
) -> Tensor:
    """Follows the velocity that `model(x, times, labels)` gives, from time 1 (noise) to 0, by the midpoint rule.

    With guidance w the velocity is v(null) + w (v(label) - v(null)) (Ho and Salimans, arXiv:2207.12598); both are one
    batch, so the model is called twice a step, whatever w is.

    Args:
        model: the (wrapped) denoiser. All ranks of a context group must give the same noise and labels.
        noise: [b, ...].
        labels: [b].
        null_label: the label that means "no condition".
        guidance: w; 1 is plain conditional sampling.
        num_steps: of the integration.
        between: called before each of them; what it raises ends the integration.
    Returns: samples, the noise's shape and dtype.
    """
    both_labels = torch.cat([labels, torch.full_like(labels, null_label)])

    def velocity(x: Tensor, time: float) -> Tensor:
        times = torch.full((2 * len(x),), time, device=x.device)
        conditional, free = model(torch.cat([x, x]), times, both_labels).to(x.dtype).chunk(2)
        return free + guidance * (conditional - free)

    x = noise
    for step in range(num_steps):
        between()
        time, length = 1 - step / num_steps, 1 / num_steps
        middle = x - velocity(x, time) * (length / 2)
        x = x - velocity(middle, time - length / 2) * length
    return x
