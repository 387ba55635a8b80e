"""MeanFlow's loss on any transformer: a forward derivative, then the gradient of the value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# The transformer's average velocity: of noisy samples [b, ...] at time t [b], over the time since r [b].
Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]


def meanflow_loss(
    velocity: Velocity, data: Tensor, noise: Tensor, times: tuple[Tensor, Tensor], *, way: str = "torch.func"
) -> Tensor:
    """Compute the loss of MeanFlow (Geng et al., arXiv:2505.13447, algorithm 1).

    Args:
        data, noise: [b, ...]. times: r and t, [b] each, r <= t. way: "torch.func" or "forward_ad".
    """
    r, t = times
    span, at = ((x).view(-1, *[1] * (data.ndim - 1)) for x in (t - r, t))
    noisy, along = (1 - at) * data + at * noise, noise - data
    tangents = (along, torch.zeros_like(r), torch.ones_like(t))
    if way == "torch.func":
        value, change = torch.func.jvp(velocity, (noisy, r, t), tangents)
    else:
        with forward_ad.dual_level():
            duals = (forward_ad.make_dual(x, y) for x, y in zip((noisy, r, t), tangents, strict=True))
            value, change = forward_ad.unpack_dual(velocity(*duals))
    return (value - (along - span * change).detach()).square().mean()


def velocity_of(model: Callable[..., Any], arguments: dict[str, Any]) -> Velocity:
    """A tiny transformer as a `Velocity`: the text is shifted by the span, since it has no input for it."""

    def velocity(x: Tensor, r: Tensor, t: Tensor) -> Tensor:
        text = arguments["encoder_hidden_states"] + (t - r).view(-1, 1, 1)
        given = {**arguments, "hidden_states": x, "encoder_hidden_states": text, "timestep": t}
        found: Tensor = model(**given, return_dict=False)[0]
        return found

    return velocity


def batch(arguments: dict[str, Any], step: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Data, noise and times of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    x = arguments["hidden_states"]
    data, noise = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(2))
    times = torch.rand(2, x.shape[0], generator=generator, dtype=x.dtype).sort(0).values
    return data, noise, (times[0], times[1])
