"""Objectives: targets, densities, shifts, drop-out and masks, on a family that is a few lines long."""

from __future__ import annotations

import logging
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_cp.errors import FamilyError
from lightning_cp.families import ObjectiveDefaults, ResolutionShift, Stored, StoredBatch, family_for
from lightning_cp.finetune.objectives.flow import shifted, unshifted
from lightning_cp.objectives import (
    Diffusion,
    FlowMatching,
    LogitNormal,
    Objective,
    Uniform,
    micro_batches,
    objective_for,
)
from lightning_cp.recipes.digits.family import LabelledClips
from tests.families.cases import made

LEVELS = tuple(np.linspace(0.999, 0.0, 1000).tolist())


class Clips(LabelledClips):
    """The family of recipes/train.py with other defaults."""

    def __init__(self, **defaults: Any) -> None:
        super().__init__({"num_classes": 10})
        self.objective = ObjectiveDefaults(**defaults)  # type: ignore[misc]


class FirstFrameGiven(Clips):
    def given_mask(self, stored: Stored, clean: Tensor) -> Tensor | None:
        given = torch.zeros(1, 1, clean.shape[2], 1, 1, dtype=torch.bool)
        given[:, :, 0] = True
        return given


class Linear(nn.Module):
    """Return a fixed multiple of the input."""

    def forward(self, noisy: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        return 0.5 * noisy


def batch(number: int = 6) -> StoredBatch:
    pixels = torch.randn(number, 1, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    return LabelledClips({"num_classes": 10}).batch(pixels, torch.arange(number) % 10)


def test_flow_targets_are_noise_minus_data() -> None:
    noised = FlowMatching(seed=0).noised(Clips(), batch(), step=1)
    sigma = noised.times.view(-1, 1, 1, 1, 1)
    assert torch.allclose(noised.noisy - sigma * noised.target, batch()["pixels"], atol=1e-6)
    assert torch.allclose(noised.noisy + (1 - sigma) * noised.target - noised.target, batch()["pixels"], atol=1e-5)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_diffusion_targets_give_back_the_data(prediction: Any) -> None:
    family = Clips(prediction=prediction, alphas_cumprod=LEVELS)
    noised = Diffusion(seed=0, time_range=(0, 900)).noised(family, batch(), step=1)
    level = torch.tensor(LEVELS)[noised.times].view(-1, 1, 1, 1, 1)
    if prediction == "epsilon":
        clean = (noised.noisy - (1 - level).sqrt() * noised.target) / level.sqrt()
    else:
        clean = level.sqrt() * noised.noisy - (1 - level).sqrt() * noised.target
    assert torch.allclose(clean, batch()["pixels"], atol=1e-4)
    assert noised.times.dtype == torch.int64


def test_sigma_is_the_factor_of_the_noise() -> None:
    diffused = Clips(prediction="epsilon", alphas_cumprod=LEVELS)
    for family, objective in ((Clips(), FlowMatching(seed=0)), (diffused, Diffusion(seed=0, time_range=(0, 900)))):
        clean, noise = torch.zeros(6, 1, 3, 2, 2), torch.ones(6, 1, 3, 2, 2)
        times = objective.times(family, clean, step=1, first_index=0)
        noisy, _ = objective.mix(family, clean, noise, times)
        sigma = objective.sigma(family, times)
        assert sigma.dtype == torch.float32
        torch.testing.assert_close(sigma, noisy.flatten(1)[:, 0])


def test_the_v_loss_is_the_published_loss_of_cogvideox() -> None:
    """The loss of x0, divided by 1 - level, is the loss of v (also at time 999, where no signal is left)."""
    family = Clips(prediction="v_prediction", alphas_cumprod=LEVELS)
    objective = Diffusion(seed=3)
    ours = objective.sample_losses(Linear(), family, batch(), step=0, first_index=0)
    noised = objective.noised(family, batch(), step=0)
    level = torch.tensor(LEVELS)[noised.times].double().view(-1, 1, 1, 1, 1)
    clean = level.sqrt() * noised.noisy.double() - (1 - level).sqrt() * 0.5 * noised.noisy.double()
    published = ((clean - batch()["pixels"]) ** 2 / (1 - level)).flatten(1).mean(dim=1)
    assert torch.allclose(ours.double(), published, rtol=1e-4)


def test_each_sample_depends_only_on_its_index() -> None:
    objective, family = FlowMatching(seed=5, cond_dropout=0.5), Clips()
    whole = objective.sample_losses(Linear(), family, batch(), step=2, first_index=0)
    part = StoredBatch({k: x[4:] for k, x in batch().tensors.items()}, batch().empty)
    assert torch.equal(objective.sample_losses(Linear(), family, part, step=2, first_index=4), whole[4:])
    assert not torch.equal(objective.sample_losses(Linear(), family, batch(), step=3, first_index=0), whole)


def test_given_latents_enter_clean_and_have_no_loss() -> None:
    family, objective = FirstFrameGiven(), FlowMatching(seed=0)
    noised = objective.noised(family, batch(), step=0)
    assert torch.equal(noised.noisy[:, :, 0], batch()["pixels"][:, :, 0])
    losses = objective.sample_losses(Linear(), family, batch(), step=0, first_index=0)
    error = (0.5 * noised.noisy - noised.target)[:, :, 1:].square()
    assert torch.allclose(losses, error.flatten(1).mean(dim=1))


def test_a_stored_mask_weights_the_loss() -> None:
    mask = torch.zeros(2, 1, 3, 2, 2)
    mask[0, :, :2] = 1
    stored = StoredBatch({**batch(2).tensors, "loss_mask": mask}, batch(2).empty)
    for family, counted in ((Clips(), slice(0, 2)), (FirstFrameGiven(), slice(1, 2))):
        noised = FlowMatching(seed=0).noised(family, stored, step=0)
        losses = FlowMatching(seed=0).sample_losses(Linear(), family, stored, step=0, first_index=0)
        error = (0.5 * noised.noisy - noised.target)[0, :, counted].square()
        assert torch.allclose(losses, torch.stack([error.mean(), torch.zeros(())]))


def test_a_guidance_of_zero_is_given_to_the_transformer() -> None:
    seen: list[float] = []

    class Guided(Clips):
        def inputs(self, noisy: Tensor, times: Tensor, stored: Stored, options: Any) -> dict[str, Any]:
            seen.append(options.guidance)
            return super().inputs(noisy, times, stored, options)

    for objective, family in (
        (FlowMatching(seed=0), Guided(guidance=0.0)),
        (FlowMatching(seed=0, guidance=0.0), Guided(guidance=3.0)),
        (FlowMatching(seed=0), Guided(guidance=3.0)),
        (FlowMatching(seed=0), Guided()),
    ):
        objective.sample_losses(Linear(), family, batch(), step=0, first_index=0)
    assert seen == [0.0, 0.0, 3.0, 1.0]


def test_extreme_densities_do_not_overflow() -> None:
    drawn = [LogitNormal(std=400.0).draw(np.random.default_rng(i)) for i in range(50)]
    assert all(0 <= sigma <= 1 for sigma in drawn)
    assert min(drawn) < 1e-20 < 0.999 < max(drawn)


def test_dropped_captions_are_replaced_by_the_empty_one() -> None:
    noised = FlowMatching(seed=0, cond_dropout=1.0).noised(Clips(), batch(), step=0)
    assert noised.stored["labels"].tolist() == [10] * 6
    without = StoredBatch(batch().tensors)
    with pytest.raises(FamilyError, match="the empty caption"):
        FlowMatching(seed=0, cond_dropout=0.5).noised(Clips(), without, step=0)


@pytest.mark.parametrize(("density", "mean"), [(Uniform(), 0.5), (LogitNormal(), 0.5), (LogitNormal(mean=1.0), 0.70)])
def test_densities_have_their_means(density: Any, mean: float) -> None:
    generator = np.random.default_rng(0)
    drawn = np.array([density.draw(generator) for _ in range(4000)])
    assert ((drawn > 0) & (drawn <= 1)).all()
    assert abs(drawn.mean() - mean) < 0.02


def test_a_mean_and_a_shift_are_the_same_distribution() -> None:
    with_mean = [LogitNormal(mean=0.7).draw(np.random.default_rng(i)) for i in range(20)]
    with_shift = [shifted(LogitNormal().draw(np.random.default_rng(i)), float(np.exp(0.7))) for i in range(20)]
    assert with_mean == pytest.approx(with_shift)


def test_the_shift_is_the_familys_unless_it_is_given() -> None:
    def times(shift: Any = None, /, **defaults: Any) -> Tensor:
        return FlowMatching(seed=0, shift=shift).noised(Clips(**defaults), batch(), step=0).times

    plain = times()
    assert torch.allclose(times(None, shift=3.0), 3 * plain / (1 + 2 * plain))
    assert torch.equal(times(1.0, shift=3.0), plain)
    rule = ResolutionShift(base_tokens=0, max_tokens=24, base_shift=0.0, max_shift=2.0)
    factor = float(np.exp(1.0))  # 12 tokens
    assert torch.allclose(times(rule), factor * plain / (1 + (factor - 1) * plain))


def test_the_clamp_of_the_shift_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rule = ResolutionShift(base_tokens=1, max_tokens=4, base_shift=0.1, max_shift=0.3)
    free = ResolutionShift(base_tokens=1, max_tokens=4, base_shift=0.1, max_shift=0.3, clamp=False)
    assert rule.factor(12) == rule.factor(4) < free.factor(12)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            FlowMatching(seed=0, shift=rule).noised(Clips(), batch(), step=step)
    assert [record.message.count("12 tokens is clamped") for record in caplog.records] == [1]


def test_a_posterior_that_is_not_stored_is_refused() -> None:
    with pytest.raises(FamilyError, match="sample_posterior=True, but labelled_clips stores only the mode"):
        FlowMatching(seed=0, sample_posterior=True).noised(Clips(), batch(), step=0)


def test_a_range_that_is_never_drawn_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"none of 10000 drawn times is in sigma_range=\(0.5, 0.500001\)"):
        FlowMatching(seed=0, sigma_range=(0.5, 0.500001)).noised(Clips(), batch(), step=0)


def test_sigma_ranges_hold() -> None:
    times = FlowMatching(seed=0, sigma_range=(0.875, 1.0), shift=3.0).noised(Clips(), batch(), step=0).times
    assert ((times > 0.875) & (times <= 1)).all()


RULE = ResolutionShift(base_tokens=0, max_tokens=24, base_shift=0.0, max_shift=2.0)  # exp(1) for 12 tokens


@pytest.mark.parametrize(
    "objective",
    [
        FlowMatching(seed=0),
        FlowMatching(seed=0, shift=5.0),
        FlowMatching(seed=0, density=Uniform(), shift=RULE),
        FlowMatching(seed=0, density=LogitNormal(mean=-0.5, std=1.7), shift=3.0, sigma_range=(0.3, 0.9)),
        FlowMatching(seed=0, density=Uniform(), shift=3.0, sigma_range=(0.875, 1.0)),
        FlowMatching(seed=0, sigma_range=(0.0, 0.4)),
        Diffusion(seed=0),
        Diffusion(seed=0, time_range=(300, 307)),
    ],
    ids=lambda objective: repr(objective),
)
def test_quantiles_are_those_of_the_drawn_times(objective: Objective) -> None:
    """The share of drawn times below the quantile is p, to 4.5 standard deviations of 4000 draws."""
    diffuses = isinstance(objective, Diffusion)
    family = Clips(prediction="epsilon", alphas_cumprod=LEVELS) if diffuses else Clips()
    clean = torch.zeros(4000, 1, 3, 2, 2)
    drawn = objective.times(family, clean, step=0, first_index=0)
    for p in (0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99):
        found = objective.times_at(family, clean[:2], p)
        assert found.shape == (2,)
        assert found.dtype == drawn.dtype
        (time,) = set(found.tolist())
        below, up_to = (drawn < time).double().mean(), (drawn <= time).double().mean()
        tolerance = 4.5 * (p * (1 - p) / len(drawn)) ** 0.5
        assert below - tolerance < p < up_to + tolerance, (p, time)
        assert drawn.min() <= time <= drawn.max() or p in (0.01, 0.99)


@pytest.mark.parametrize("shift", [0.2, 1.0, 12.0])
def test_quantiles_are_within_the_range(shift: float) -> None:
    densities, ranges = (Uniform(), LogitNormal(), LogitNormal(mean=1.5)), ((0.0, 1.0), (0.875, 1.0), (0.4, 0.6))
    for density, sigma_range, p in product(densities, ranges, (1e-9, 0.5, 1 - 1e-16)):
        objective = FlowMatching(seed=0, density=density, shift=shift, sigma_range=sigma_range)
        time = objective.times_at(Clips(), batch()["pixels"], p)[0]
        low, high = torch.tensor(sigma_range)
        assert low <= time <= high


def test_a_quantile_of_a_range_that_is_never_drawn_is_an_error() -> None:
    objective = FlowMatching(seed=0, sigma_range=(0.5, 0.500001))
    with pytest.raises(ValueError, match=r"fewer than 1 of 10000 times is in sigma_range=\(0.5, 0.500001\)"):
        objective.times_at(Clips(), batch()["pixels"], 0.5)
    with pytest.raises(ValueError, match="time_range=\\(0, 2000\\) must be"):
        Diffusion(seed=0, time_range=(0, 2000)).times_at(Clips(alphas_cumprod=LEVELS), batch()["pixels"], 0.5)


@pytest.mark.parametrize("density", [Uniform(), LogitNormal(), LogitNormal(mean=-1.0, std=0.3), LogitNormal(std=400.0)])
def test_quantile_inverts_the_distribution_function(density: Any) -> None:
    assert density.cdf(0.0) == 0
    assert density.cdf(1.0) == 1
    for p in (0.1, 0.5, 0.9):
        sigma = density.quantile(p)
        assert 0 <= sigma <= 1
        if 1e-3 < sigma < 0.999:
            assert density.cdf(sigma) == pytest.approx(p, abs=1e-12)
            assert unshifted(shifted(sigma, 3.0), 3.0) == pytest.approx(sigma, abs=1e-15)


def test_given_times_replace_the_drawn_ones_and_nothing_else() -> None:
    objective = FlowMatching(seed=0)
    drawn = objective.noised(Clips(), batch(), step=4)
    given = objective.noised(Clips(), batch(), step=4, times=torch.full((6,), 0.25))
    assert given.times.tolist() == [0.25] * 6
    assert torch.equal(given.target, drawn.target)
    assert torch.allclose(given.noisy, batch()["pixels"] + 0.25 * given.target, atol=1e-6)
    same = objective.sample_losses(Linear(), Clips(), batch(), step=4, first_index=0, times=drawn.times)
    assert torch.equal(same, objective.sample_losses(Linear(), Clips(), batch(), step=4, first_index=0))


def test_the_objective_fits_the_family() -> None:
    assert isinstance(objective_for(Clips(), seed=0), FlowMatching)
    diffusion = Clips(prediction="epsilon", alphas_cumprod=LEVELS)
    assert isinstance(objective_for(diffusion, seed=0), Diffusion)
    with pytest.raises(ValueError, match="train it with Diffusion"):
        FlowMatching(seed=0).noised(diffusion, batch(), step=0)
    with pytest.raises(ValueError, match="train it with FlowMatching"):
        Diffusion(seed=0, time_range=None).mix(Clips(), batch()["pixels"], batch()["pixels"], torch.zeros(6).long())


def test_micro_batches_have_the_losses_of_the_whole_batch() -> None:
    family, stored, objective = Clips(), batch(5), FlowMatching(seed=3)
    whole = objective.loss(Linear(), family, stored, step=4, first_index=10)
    times = objective.times(family, family.clean(stored), step=4, first_index=10)
    for size, counts in ((2, [2, 2, 1]), (5, [5]), (9, [5]), (None, [5])):
        parts = list(micro_batches(objective, family, stored, size=size, step=4, first_index=10))
        assert [len(part.stored) for part in parts] == counts
        assert [part.is_last for part in parts] == [False] * (len(counts) - 1) + [True]
        loss, sigma = (sum(values) for values in zip(*(part.loss(Linear()) for part in parts), strict=True))
        torch.testing.assert_close(loss, whole)
        torch.testing.assert_close(sigma, times.mean())


@pytest.mark.parametrize("case", ["wan_two_experts", "wan_image_two_experts"])
def test_an_expert_is_trained_where_its_pipeline_uses_it(case: str) -> None:
    family, boundary = family_for(made(case)), 0.875
    for component, expected in (("transformer", (boundary, 1.0)), ("transformer_2", (0.0, boundary))):
        objective = objective_for(family, seed=0, component=component)
        assert isinstance(objective, FlowMatching)
        assert objective.sigma_range == expected
        drawn = objective.times(family, torch.zeros(16, 4, 1, 4, 4), step=0, first_index=0)
        assert ((drawn > expected[0]) & (drawn <= expected[1])).all()  # sigmas after the shift
        low, high = (objective.times_at(family, torch.zeros(1, 4, 1, 4, 4), p) for p in (0.01, 0.99))
        assert expected[0] < low < high <= expected[1]
        given = objective_for(family, seed=0, component=component, sigma_range=(0.2, 0.3))
        assert isinstance(given, FlowMatching)
        assert given.sigma_range == (0.2, 0.3)
    assert objective_for(family_for(made("wan")), seed=0) == FlowMatching(seed=0)
    with pytest.raises(FamilyError, match=r"boundary_ratio=1.5 of the pipeline must be above 0 and below 1"):
        type(family)({**family.facts, "boundary_ratio": 1.5}).sigma_range("transformer")
