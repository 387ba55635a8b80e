"""Loss of preference pairs."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo_loss(errors: Tensor, reference_errors: Tensor, *, beta: float) -> Tensor:
    """Return the Diffusion-DPO loss of each pair, [b]: -log sigmoid(-beta·(d_preferred - d_rejected)).

    d is the error of the model minus the error of the reference policy, at the same noise and time. A loss below log(2)
    says that the model prefers the preferred sample more than the reference does.

    Args:
        errors: mean squared error of the model for each sample, [2b]: b preferred samples, then the b rejected ones.
            Both samples of a pair have the same noise and time.
        reference_errors: errors of the reference policy (`reference_policy`), [2b].
        beta: weight, above 0. The smaller, the further the model may move from the reference.
    Raises: ValueError: the shapes differ, the length is odd, or beta is not above 0.
    Source: Wallace et al., arXiv:2311.12908.
    """
    if not beta > 0:
        raise ValueError(f"beta={beta} must be above 0")
    if errors.shape != reference_errors.shape or errors.dim() != 1 or len(errors) % 2:
        raise ValueError(
            f"errors {tuple(errors.shape)} and reference_errors {tuple(reference_errors.shape)} must both be [2b]: one "
            "number for each preferred sample, then one for each rejected sample"
        )
    preferred, rejected = (errors - reference_errors.detach()).chunk(2)
    return -logsigmoid(-beta * (preferred - rejected))
