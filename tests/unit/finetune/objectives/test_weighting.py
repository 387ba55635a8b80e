"""Weights of the loss by noise level against diffusers' functions and the definition; the pseudo-Huber error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.training_utils import compute_loss_weighting_for_sd3, compute_snr

from lightning_cp.objectives import Diffusion, FlowMatching
from tests.unit.finetune.objectives.test_objectives import LEVELS, Clips, Linear, batch


def _ratio(objective: Any, plain: Any, family: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of the samples, and their times."""
    losses = [x.sample_losses(Linear(), family, batch(), step=1, first_index=0) for x in (objective, plain)]
    return losses[0] / losses[1], plain.times(family, batch()["pixels"], step=1, first_index=0)


@pytest.mark.parametrize("name", ["cosmap", "sigma_sqrt"])
def test_weights_of_flow_matching_are_those_of_diffusers(name: str) -> None:
    found, sigma = _ratio(FlowMatching(seed=0, weighting=name), FlowMatching(seed=0), Clips())
    torch.testing.assert_close(found, compute_loss_weighting_for_sd3(name, sigma))


@pytest.mark.parametrize("gamma", [1.0, 5.0])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_min_snr_of_diffusion_is_that_of_diffusers_trainers(prediction: Any, gamma: float) -> None:
    family = Clips(prediction=prediction, alphas_cumprod=LEVELS)
    plain, weighted = (
        Diffusion(seed=0, time_range=(0, 900), weighting=name, min_snr_gamma=gamma) for name in (None, "min_snr")
    )
    found, times = _ratio(weighted, plain, family)
    snr = compute_snr(SimpleNamespace(alphas_cumprod=torch.tensor(LEVELS)), times)
    expected = snr.clamp(max=gamma) / (snr if prediction == "epsilon" else snr + 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_min_snr_of_flow_matching_weights_the_error_of_the_data() -> None:
    """x0 is noisy - sigma · velocity, so its squared error is sigma² times that of the velocity."""
    found, sigma = _ratio(FlowMatching(seed=0, weighting="min_snr"), FlowMatching(seed=0), Clips())
    snr = ((1 - sigma) / sigma).square()
    torch.testing.assert_close(found, snr.clamp(max=5.0) * sigma.square())
    assert 0 < found.min() < found.max() <= 1


def test_where_no_signal_is_left_the_weight_is_finite() -> None:
    for prediction, expected in (("epsilon", 1.0), ("v_prediction", 0.0)):
        family: Any = Clips(prediction=prediction, alphas_cumprod=[0.9, 0.0])  # type: ignore[arg-type]
        plain, weighted = (Diffusion(seed=0, time_range=(1, 2), weighting=name) for name in (None, "min_snr"))
        found, _ = _ratio(weighted, plain, family)
        assert found.tolist() == pytest.approx([expected] * len(found))


def test_the_pseudo_huber_error_is_squared_for_small_and_linear_for_large_differences() -> None:
    large = FlowMatching(seed=0, huber_c=1e4).sample_losses(Linear(), Clips(), batch(), step=1, first_index=0)
    squared = FlowMatching(seed=0).sample_losses(Linear(), Clips(), batch(), step=1, first_index=0)
    torch.testing.assert_close(large, squared, rtol=1e-3, atol=1e-3)
    c = 1e-4
    small = FlowMatching(seed=0, huber_c=c).sample_losses(Linear(), Clips(), batch(), step=1, first_index=0)
    noised = FlowMatching(seed=0).noised(Clips(), batch(), step=1)
    differences = (0.5 * noised.noisy - noised.target).abs()  # type: ignore[operator, union-attr]
    torch.testing.assert_close(small / (2 * c), differences.flatten(1).mean(dim=1), rtol=1e-2, atol=1e-4)
