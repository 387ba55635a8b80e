"""Weights of a sample's loss by its noise level, the pseudo-Huber error, and the mean error of each sample."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Of flow matching, by sigma: those of Stable Diffusion 3 (arXiv:2403.03206), with diffusers' names.
_OF_FLOW: dict[str, Callable[[Tensor], Tensor]] = {
    "cosmap": lambda sigma: 2 / (math.pi * (1 - 2 * sigma + 2 * sigma.square())),
    "sigma_sqrt": lambda sigma: sigma**-2,
}
WEIGHTINGS = ("min_snr", *_OF_FLOW)


def check_weighting(weighting: str | None, gamma: float, huber_c: float | None, *, is_flow: bool) -> None:
    """Check the settings of the loss. Raises: ValueError: a value is not valid, or not for this objective."""
    valid = WEIGHTINGS if is_flow else ("min_snr",)
    if weighting is not None and weighting not in valid:
        raise ValueError(f"weighting={weighting!r} is not valid here: must be None or one of {', '.join(valid)}")
    if not gamma > 0:
        raise ValueError(f"min_snr_gamma={gamma} must be positive")
    if huber_c is not None and not huber_c > 0:
        raise ValueError(f"huber_c={huber_c} must be positive, or None")


def loss_weight(weighting: str, sigma: Tensor, prediction: str, gamma: float) -> Tensor:
    """Return the weight of each sample's loss, [b].

    "min_snr" (arXiv:2303.09556) weights the squared error of x0 with min(SNR, gamma), where SNR is (signal / sigma)².
    For the error of the prediction, this is min(1, gamma / SNR) for noise, and min(SNR, gamma)·sigma² for a velocity.

    Args:
        sigma: factor of the noise, [b].
        prediction: "flow", "epsilon" or "v_prediction".
    """
    if weighting in _OF_FLOW:
        return _OF_FLOW[weighting](sigma)
    signal_squared = (1 - sigma).square() if prediction == "flow" else 1 - sigma.square()
    if prediction == "epsilon":
        return torch.clamp(gamma * sigma.square() / signal_squared, max=1.0)
    return torch.minimum(signal_squared, gamma * sigma.square())


def pseudo_huber(error: Tensor, c: float) -> Tensor:
    """Return 2c(√(error² + c²) - c): error² for small errors, and linear for large ones (arXiv:2310.14189)."""
    squared = error.square()
    return 2 * c * squared / ((squared + c * c).sqrt() + c)  # the same, without the rounding of a difference


def sample_means(errors: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the weighted mean of the errors of each sample, [b]. A sample with weight 0 everywhere has 0.

    Args: errors: [b, ...]. weights: broadcastable to them; None: 1.
    """
    if weights is None:
        return errors.flatten(1).mean(dim=1)
    weights = weights.to(errors.dtype).expand_as(errors)
    total = weights.flatten(1).sum(dim=1)
    return (errors * weights).flatten(1).sum(dim=1) / torch.where(total > 0, total, 1.0)
