"""Sample a flow model: integrate its velocity from noise to data with CFG."""

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
    """Integrate the velocity `model(x, times, labels)` from time 1 (noise) to 0 (data) with the midpoint rule.

    With guidance w the velocity is v(null) + w (v(label) - v(null)) (Ho and Salimans, arXiv:2207.12598). Both terms
    are computed in one batch, so the model is called twice per step for any w.

    Args:
        model: the (wrapped) denoiser. All ranks of a context group must pass the same noise and labels.
        noise: initial noise, [b, ...].
        labels: class labels, [b].
        null_label: label that means "no condition".
        guidance: guidance scale w; 1 is plain conditional sampling.
        num_steps: number of integration steps.
        between: called before each step; an exception from it ends the integration.
    Returns: samples, with the shape and dtype of `noise`.
    """
    both_labels = torch.cat([labels, torch.full_like(labels, null_label)])

    def velocity(x: Tensor, time: float) -> Tensor:
        times = torch.full((2 * len(x),), time, device=x.device)
        conditional, unconditional = model(torch.cat([x, x]), times, both_labels).to(x.dtype).chunk(2)
        return unconditional + guidance * (conditional - unconditional)

    x = noise
    for step in range(num_steps):
        between()
        time, length = 1 - step / num_steps, 1 / num_steps
        middle = x - velocity(x, time) * (length / 2)
        x = x - velocity(middle, time - length / 2) * length
    return x
