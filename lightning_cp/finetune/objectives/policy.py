"""Pieces of post-training: random steps of a flow, advantages, losses, and the reference policy."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from lightning_cp.comm.agree import gather_objects
from lightning_cp.pipelines.adapters import adapted_layers, adapter_parameters

StepKind = Literal["flow_grpo", "cps"]


class SdeStep(NamedTuple):
    """A random step, in float32 or wider.

    Attributes:
        next: noisy latents after the step, [b, ...].
        log_prob: logarithm of the density of `next`, the mean over the elements of a sample, [b].
        mean: mean of the normal distribution of `next`, [b, ...].
        std: standard deviation of this distribution, broadcastable to `next`.
    """

    next: Tensor
    log_prob: Tensor
    mean: Tensor
    std: Tensor


def sde_step(
    x: Tensor,
    velocity: Tensor,
    sigma: float | Tensor,
    sigma_next: float | Tensor,
    *,
    noise: Tensor | None = None,
    next: Tensor | None = None,
    eta: float,
    kind: StepKind = "flow_grpo",
) -> SdeStep:
    """Take a random step from sigma to sigma_next, or compute the log-probability of a step that was taken.

    At `x = (1 - sigma)·x0 + sigma·noise`, the velocity is the prediction of `noise - x0`. Latents at sigma_next are

    - "flow_grpo": a step of the SDE with the marginals of the flow, `dx = (v + g²/(2 sigma)·(x + (1 - sigma)·v)) dsigma
      + g dW` with `g = eta·sqrt(sigma / (1 - sigma))` (arXiv:2505.05470). At sigma=1, sigma_next is used in the
      denominator.
    - "cps": `(1 - sigma_next)·x0 + sigma_next·(cos(eta·pi/2)·x1 + sin(eta·pi/2)·noise)` with the predicted data x0 and
      noise x1. The coefficients of data and noise are those of the flow, whatever the step size (arXiv:2509.05952).

    A rollout and a training step give equal bits for equal arguments. Keep `next` in float32: rounded latents have
    another log-probability.

    Args:
        x: noisy latents, [b, ...].
        velocity: output of the model at x and sigma, in any dtype.
        sigma, sigma_next: 1 >= sigma > sigma_next >= 0; numbers, or one for each sample, [b].
        noise: standard normal numbers like x, in a rollout; see `lightning_cp.training.sample_noise`.
        next: latents that a rollout has reached, in training.
        eta: amount of noise, above 0; at most 1 with "cps".
        kind: the step.
    Gradient: of `log_prob` and `mean`, to the velocity. (`next` has none: a log-probability is that of a fixed step.)
    Raises: ValueError: noise and next are both given, or none; no such kind; a value outside of its interval; a step
        without noise ("cps" to sigma_next=0). Values of sigma on a GPU are not checked.
    """
    if (noise is None) == (next is None):
        raise ValueError(
            "give noise to take a step, or next for the log-probability of a step that was taken: one of both"
        )
    if kind not in ("flow_grpo", "cps"):
        raise ValueError(f"kind={kind!r} must be 'flow_grpo' or 'cps'")
    if not eta > 0 or (kind == "cps" and eta > 1):
        raise ValueError(f"eta={eta} must be above 0{' and at most 1' if kind == 'cps' else ''}: a step needs noise")
    wide = torch.promote_types(x.dtype, torch.float32)
    x, velocity = x.to(wide), velocity.to(wide)
    s, t = (_levels(value, x) for value in (sigma, sigma_next))
    _check_levels(s, t, kind)
    x0, x1 = x - s * velocity, x + (1 - s) * velocity
    if kind == "flow_grpo":
        std_rate = eta * (s / (1 - torch.where(s == 1, t, s))).sqrt()
        mean = x + (velocity + std_rate.square() / (2 * s) * x1) * (t - s)
        std = std_rate * (s - t).sqrt()
    else:
        mean = (1 - t) * x0 + t * math.cos(eta * math.pi / 2) * x1
        std = t * math.sin(eta * math.pi / 2)
    if noise is not None:
        next = mean + std * noise.to(wide)
    assert next is not None, "checked above"
    next = next.to(wide).detach()
    density = -((next - mean) / std).square() / 2 - std.log() - math.log(2 * math.pi) / 2
    return SdeStep(next, density.flatten(1).mean(dim=1), mean, std)


def gaussian_kl(step: SdeStep, reference: SdeStep) -> Tensor:
    """Return the KL divergence of a step from the reference's, the mean over the elements of a sample, [b].

    Args: step, reference: from `sde_step` with equal arguments but the velocity.
    """
    return ((step.mean - reference.mean) / step.std).square().flatten(1).mean(dim=1) / 2


def policy_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, *, clip: float) -> Tensor:
    """Return the clipped loss of each step, [b]: the larger of -A·ratio and -A·clamp(ratio, 1 - clip, 1 + clip).

    `sde_step` returns means over elements, so ratios are close to 1 and a usual `clip` is 1e-5 to 1e-3.

    Args:
        log_prob: log-probabilities of the model that is trained, [b].
        old_log_prob: log-probabilities of the rollout, [b].
        advantages: advantage A of each sample, [b].
        clip: largest change of the ratio that is rewarded.
    Raises: ValueError: clip is not above 0.
    """
    if not clip > 0:
        raise ValueError(f"clip={clip} must be above 0")
    ratio = (log_prob - old_log_prob.detach()).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))


def group_advantages(
    rewards: Tensor, prompts: Sequence[Hashable], *, std: Literal["group", "all"] = "group", eps: float = 1e-4
) -> Tensor:
    """Return (reward - mean of its prompt) / (std + eps) for each sample of this rank, float32 [b].

    A prompt's samples may be in several data groups, and data groups may have different numbers of samples. All ranks
    of a context group have the same rewards: they count equally often, which changes neither means nor deviations.

    Args:
        rewards: rewards of this rank's samples, [b].
        prompts: the prompt of each sample, or another value that identifies it, such as a label.
        std: "group": standard deviation of the prompt's rewards. "all": that of all rewards of the step.
        eps: added to the standard deviation.
    Ranks: the whole world, if there are process groups.
    Raises: ValueError: not one prompt for each reward, on all ranks; no such `std`.
    """
    if std not in ("group", "all"):
        raise ValueError(f"std={std!r} must be 'group' or 'all'")
    own = (rewards.flatten().tolist(), list(prompts))
    of_prompt: dict[Hashable, list[float]] = {}
    for rank, (values, names) in enumerate(gather_objects(own, dist.group.WORLD if dist.is_initialized() else None)):
        if len(values) != len(names):
            raise ValueError(
                f"rank {rank} has {len(values)} rewards, but {len(names)} prompts: give one prompt for each"
            )
        for value, name in zip(values, names, strict=True):
            of_prompt.setdefault(name, []).append(value)
    means = {name: math.fsum(values) / len(values) for name, values in of_prompt.items()}
    scale = _std([value for values in of_prompt.values() for value in values])
    scales = {name: scale if std == "all" else _std(values) for name, values in of_prompt.items()}
    advantages = [(value - means[name]) / (scales[name] + eps) for value, name in zip(*own, strict=True)]
    return torch.tensor(advantages, dtype=torch.float32, device=rewards.device)


def _std(values: Sequence[float]) -> float:
    """Return the standard deviation. `fsum` is exact, so the order of the samples does not matter."""
    if not values:  # no rank has a sample
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / len(values))


def _levels(sigma: float | Tensor, x: Tensor) -> Tensor:
    levels = torch.as_tensor(sigma, dtype=x.dtype, device=x.device)
    return levels.view(-1, *[1] * (x.dim() - 1))


def _check_levels(sigma: Tensor, sigma_next: Tensor, kind: StepKind) -> None:
    if sigma.device.type != "cpu":  # the host would wait for the device
        return
    if not ((sigma <= 1) & (sigma_next < sigma) & (sigma_next >= 0)).all():
        raise ValueError(
            f"sigma={sigma.flatten().tolist()}, sigma_next={sigma_next.flatten().tolist()} must be "
            "1 >= sigma > sigma_next >= 0"
        )
    if kind == "cps" and not (sigma_next > 0).all():
        raise ValueError(
            "sigma_next=0: the last step of 'cps' has no noise, and so no log-probability: compute x - sigma·velocity, "
            "and train on the steps before"
        )


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


_SWITCH = "_disable_adapters"  # peft's own method also changes requires_grad, which DDP and FSDP2 do not follow


@contextmanager
def reference_policy(model: nn.Module) -> Iterator[None]:
    """Switch the adapters (peft) of a model off inside the context: it is then the model before training.

    No weights are copied. The model may be wrapped by Fabric, DDP, FSDP2 or `torch.compile`, and parallel; compiled
    blocks get a second graph. `requires_grad` does not change. Adapters that were off before stay off afterwards.

    It has no gradients: activation checkpointing and `mlp_tiles` compute a forward again in backward, with the adapters
    of then. So enter it under `torch.no_grad()` or `inference_mode`, and call the backward of the policy outside. Where
    gradients shall flow through the reference to its inputs, keep a frozen copy of the model.

        with torch.no_grad(), reference_policy(model):
            reference = model(...)

    Args: model: a module with adapters anywhere inside.
    Ranks: all that run the forward.
    Raises: ValueError: gradients are enabled, at the start or where an adapted layer runs inside (a backward that
        recomputes the policy, too); the model has no adapters, they are merged, or other weights are trained.
    """
    _check_no_gradients()
    layers: list[Any] = list(adapted_layers(model))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no adapters, so there is no model without them: add a LoRA before set-up "
            "(`lightning_cp.finetune.add_lora`), or keep a frozen copy of the model as the reference"
        )
    if any(layer.merged for layer in layers):
        raise ValueError("the adapters are merged into the weights: call unmerge_adapter() or unfuse_lora() before")
    adapters = adapter_parameters(model)
    trained = [name for name, x in model.named_parameters() if x.requires_grad and x not in adapters]
    if trained:
        raise ValueError(
            f"{trained[0]} is trained and belongs to no adapter, so the model without adapters changes in training, "
            "too: freeze it, or keep a frozen copy of the model as the reference"
        )
    before = [getattr(layer, _SWITCH) for layer in layers]
    checks = [layer.register_forward_pre_hook(_check_no_gradients) for layer in (model, *layers)]
    try:
        for layer in layers:
            setattr(layer, _SWITCH, True)
        yield
    finally:
        for layer, state in zip(layers, before, strict=True):
            setattr(layer, _SWITCH, state)
        for check in checks:
            check.remove()


def _check_no_gradients(*_: Any) -> None:
    """Refuse gradients: a recomputation cannot know which of its forwards had adapters. Also a forward pre-hook."""
    if torch.is_grad_enabled():
        raise ValueError(
            "reference_policy has no gradients: enter torch.no_grad() before, call backward outside of the context; "
            "keep a frozen copy of the model as the reference where gradients must flow through it to its inputs"
        )
