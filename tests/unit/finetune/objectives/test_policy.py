"""The random flow step keeps the flow's marginals; log-probabilities, advantages and losses of a policy."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.checkpoint import checkpoint

from lightning_cp.data import RandomStream
from lightning_cp.finetune import LoraSettings, add_lora
from lightning_cp.objectives import dpo_loss, gaussian_kl, group_advantages, policy_loss, reference_policy, sde_step
from lightning_cp.training import sample_noise
from tests.models.wan import wan


def _velocity(x: Tensor, sigma: float, mean: float, std: float) -> Tensor:
    """Return the exact velocity E[noise - x0 | x] of data N(mean, std²)."""
    surprise = (x - (1 - sigma) * mean) / ((1 - sigma) ** 2 * std**2 + sigma**2)
    return sigma * surprise - (mean + (1 - sigma) * std**2 * surprise)


def _rollout(
    steps: int, *, kind: str, eta: float, std: float, last: float = 0.0, number: int = 200_000
) -> tuple[float, float]:
    """Return mean and standard deviation at sigma=last of samples that begin as noise at sigma=1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(number, 1, generator=generator, dtype=torch.float64)
    levels = torch.linspace(1, last, steps + 1).tolist()
    for sigma, following in pairwise(levels):
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        velocity = _velocity(x, sigma, 1.5, std)
        x = sde_step(x, velocity, sigma, following, noise=noise, eta=eta, kind=kind).next  # type: ignore[arg-type]
    return float(x.mean()), float(x.std())


def test_the_sde_keeps_mean_and_variance_of_the_flow() -> None:
    mean, std = _rollout(100, kind="flow_grpo", eta=0.7, std=0.5, number=50_000)
    assert abs(mean - 1.5) < 0.02
    assert abs(std - 0.5) < 0.03  # the rest is that of Euler steps; a wrong score gives 0.1 and more
    coarse = abs(_rollout(25, kind="flow_grpo", eta=0.7, std=0.5, number=50_000)[1] - 0.5)
    assert abs(std - 0.5) < coarse / 2


@pytest.mark.parametrize("eta", [0.3, 1.0])
@pytest.mark.parametrize("steps", [2, 7])
def test_coefficients_are_preserved_at_any_step_size(steps: int, eta: float) -> None:
    mean, std = _rollout(steps, kind="cps", eta=eta, std=0.0, last=0.25)
    assert abs(mean - 0.75 * 1.5) < 0.003
    assert abs(std - 0.25) < 0.002  # the level of the noise, for data without variance


@pytest.mark.parametrize("kind", ["flow_grpo", "cps"])
def test_log_probabilities_are_those_of_the_normal_distribution_and_of_the_rollout(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, velocity, noise = (torch.randn(3, 4, 5, generator=generator).bfloat16() for _ in range(3))
    for sigma, following in ((1.0, 0.8), (torch.tensor([0.9, 0.5, 0.2]), torch.tensor([0.8, 0.3, 0.1]))):
        settings = {"eta": 0.6, "kind": kind}
        taken = sde_step(x, velocity, sigma, following, noise=noise, **settings)  # type: ignore[arg-type]
        again = sde_step(x, velocity, sigma, following, next=taken.next, **settings)  # type: ignore[arg-type]
        assert torch.equal(taken.log_prob, again.log_prob)
        assert taken.log_prob.dtype == taken.next.dtype == torch.float32
        assert taken.log_prob.shape == (3,)
        density = Normal(taken.mean, taken.std.expand_as(taken.mean)).log_prob(taken.next)
        torch.testing.assert_close(taken.log_prob, density.mean(dim=(1, 2)))
        torch.testing.assert_close((taken.next - taken.mean) / taken.std, noise.float(), atol=1e-5, rtol=1e-5)


def test_gradients_reach_the_velocity_only_through_the_mean() -> None:
    x, noise = torch.randn(2, 3), torch.randn(2, 3)
    velocity = torch.randn(2, 3, requires_grad=True)
    step = sde_step(x, velocity, 0.5, 0.4, noise=noise, eta=0.7)
    (step.log_prob.sum() * 3).backward()
    with torch.enable_grad():
        std = 0.7 * math.sqrt(0.1)
        slope = -0.1 * (1 + 0.49 * 0.5)  # of the mean: dsigma·(1 + g²·(1 - sigma) / (2·sigma)) with g = 0.7
    torch.testing.assert_close(velocity.grad, noise / std * slope)
    assert not step.next.requires_grad


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"noise": None}, "one of both"),
        ({"next": torch.zeros(2, 3)}, "one of both"),
        ({"kind": "ddim"}, "kind='ddim' must be"),
        ({"eta": 0.0}, "eta=0.0 must be above 0: a step"),
        ({"eta": 1.5, "kind": "cps"}, "eta=1.5 must be above 0 and at most 1"),
        ({"sigma": 1.2}, "1 >= sigma > sigma_next >= 0"),
        ({"sigma_next": 0.5}, "1 >= sigma > sigma_next >= 0"),
        ({"sigma_next": 0.0, "kind": "cps"}, "the last step of 'cps' has no noise"),
    ],
)
def test_bad_steps_are_refused(changed: dict[str, object], message: str) -> None:
    settings = {"noise": torch.zeros(2, 3), "eta": 0.5, "sigma": 0.5, "sigma_next": 0.25, **changed}
    with pytest.raises(ValueError, match=message):
        sde_step(torch.zeros(2, 3), torch.zeros(2, 3), **settings)  # type: ignore[arg-type]


def test_noise_depends_on_seed_sample_and_step_only() -> None:
    def draw(samples: list[int], **changed: int) -> Tensor:
        key = {"seed": 1, "step": 2, "stream": RandomStream.ROLLOUT, **changed}
        return sample_noise((len(samples), 3), first_index=samples, **key)

    whole = draw([0, 1, 2, 3])
    assert torch.equal(whole[[3, 1]], draw([3, 1]))  # another division of the batch
    assert len({float(x) for x in whole[:, 0]}) == 4
    assert not torch.equal(whole, draw([0, 1, 2, 3], step=3))
    assert not torch.equal(whole, draw([0, 1, 2, 3], seed=3))
    assert not torch.equal(whole, draw([0, 1, 2, 3], stream=RandomStream.NOISE))


def test_the_policy_loss_stops_where_the_ratio_is_clipped() -> None:
    old = torch.zeros(4)
    new = torch.tensor([0.0, 0.5, 0.5, -0.5], requires_grad=True)
    losses = policy_loss(new, old, torch.tensor([2.0, 1.0, -1.0, -1.0]), clip=0.2)
    torch.testing.assert_close(losses, torch.tensor([-2.0, -1.2, math.exp(0.5), 0.8]))
    losses.sum().backward()
    torch.testing.assert_close(new.grad, torch.tensor([-2.0, 0.0, math.exp(0.5), 0.0]))
    with pytest.raises(ValueError, match="clip=0 must be above 0"):
        policy_loss(new, old, old, clip=0)


def test_the_divergence_is_that_of_two_normal_distributions() -> None:
    generator = torch.Generator().manual_seed(2)
    x, noise, first, second = (torch.randn(2, 6, generator=generator) for _ in range(4))
    step, reference = (sde_step(x, v, 0.6, 0.5, noise=noise, eta=0.7) for v in (first, second))
    normals = [Normal(one.mean, one.std.expand_as(one.mean)) for one in (step, reference)]
    torch.testing.assert_close(gaussian_kl(step, reference), torch.distributions.kl_divergence(*normals).mean(dim=1))


def test_advantages_are_centred_for_each_prompt() -> None:
    rewards = torch.tensor([1.0, 0.0, 3.0, 5.0, 5.0])
    advantages = group_advantages(rewards, ["a", "a", "b", "b", "b"], eps=0.0)
    of_b = rewards[2:]
    torch.testing.assert_close(advantages[:2], torch.tensor([1.0, -1.0]))
    torch.testing.assert_close(advantages[2:], (of_b - of_b.mean()) / of_b.std(correction=0))
    of_all = group_advantages(rewards, ["a", "a", "b", "b", "b"], std="all", eps=0.0)
    torch.testing.assert_close(of_all[:2], torch.tensor([0.5, -0.5]) / rewards.std(correction=0))
    assert group_advantages(torch.ones(3), [0, 0, 0]).eq(0).all()
    with pytest.raises(ValueError, match="rank 0 has 5 rewards, but 1 prompts"):
        group_advantages(rewards, ["a"])
    with pytest.raises(ValueError, match="std='batch' must be 'group' or 'all'"):
        group_advantages(rewards, list("aabbb"), std="batch")  # type: ignore[arg-type]


def _adapted() -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    """Return Wan with a LoRA that changes its output, its arguments, and its output without the LoRA."""
    tiny = wan()
    model = tiny.build().float()
    arguments = {name: x.float() if x.is_floating_point() else x for name, x in tiny.arguments().items()}
    without = model(**arguments, return_dict=False)[0].detach()
    add_lora(model, LoraSettings(rank=2, targets=["to_q", "to_v"]))
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "lora_B" in name:
                x.fill_(0.1)
    return model, arguments, without


@torch.no_grad()
def test_the_reference_policy_is_the_model_before_training_and_restored_after_an_error() -> None:
    model, arguments, without = _adapted()
    trained = {name for name, x in model.named_parameters() if x.requires_grad}
    adapted = model(**arguments, return_dict=False)[0]
    with reference_policy(model):
        assert torch.equal(model(**arguments, return_dict=False)[0], without)
        assert {name for name, x in model.named_parameters() if x.requires_grad} == trained
    assert torch.equal(model(**arguments, return_dict=False)[0], adapted)
    with pytest.raises(ZeroDivisionError), reference_policy(model):
        1 / 0
    assert torch.equal(model(**arguments, return_dict=False)[0], adapted)
    assert not torch.equal(adapted, without)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_inside_of_the_reference_policy_are_refused(reentrant: bool) -> None:
    model, arguments, without = _adapted()
    model.train().enable_gradient_checkpointing(
        gradient_checkpointing_func=partial(checkpoint, use_reentrant=reentrant)
    )
    arguments["hidden_states"].requires_grad_()
    with pytest.raises(ValueError, match=r"has no gradients: enter torch\.no_grad\(\)"), reference_policy(model):
        pass
    loss = model(**arguments, return_dict=False)[0].sum()
    with torch.no_grad(), reference_policy(model):
        assert torch.equal(model(**arguments, return_dict=False)[0], without)
        with pytest.raises(ValueError, match="call backward outside of the context"):
            loss.backward()  # recomputes the policy
        with torch.enable_grad(), pytest.raises(ValueError, match="has no gradients"):
            model(**arguments)
    model(**arguments, return_dict=False)[0].sum().backward()
    assert all(x.grad is not None for x in model.parameters() if x.requires_grad)


@torch.no_grad()
def test_a_model_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no adapters"), reference_policy(nn.Linear(2, 2)):
        pass
    model, _, _ = _adapted()
    model.proj_out.weight.requires_grad_()
    with pytest.raises(ValueError, match=r"proj_out\.weight is trained and belongs to no adapter"):
        reference_policy(model).__enter__()
    model.proj_out.weight.requires_grad_(False)
    model.fuse_lora()
    with pytest.raises(ValueError, match="merged"):
        reference_policy(model).__enter__()


def test_the_preference_loss_is_log_2_for_the_reference_and_falls_where_the_preferred_error_falls_more() -> None:
    reference = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)  # pairs (1, 3) and (2, 4)
    assert torch.equal(dpo_loss(reference, reference, beta=5.0), torch.full((2,), math.log(2), dtype=torch.float64))
    change = torch.tensor([-0.2, 0.1, -0.1, 0.0], dtype=torch.float64)
    expected = torch.log1p(torch.exp(5.0 * torch.tensor([-0.1, 0.1], dtype=torch.float64)))
    torch.testing.assert_close(dpo_loss(reference + change, reference, beta=5.0), expected)
    with pytest.raises(ValueError, match="beta=0 must be above 0"):
        dpo_loss(reference, reference, beta=0)
    with pytest.raises(ValueError, match=r"must both be \[2b\]"):
        dpo_loss(reference[:3], reference[:3], beta=1.0)
