"""Prodigy: its steps, its estimate of the learning rate, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp.training.prodigy import Prodigy

STARTS, GOALS = (0.0, 2.0, -1.0), (1.0, -1.0, 3.0)


def trained(steps: int, rates: list[float], **settings: Any) -> tuple[list[float], dict[str, Any]]:
    """Minimise the distance from `GOALS`. Returns: the weights, and the values of the parameter group."""
    weights = [nn.Parameter(torch.tensor([x], dtype=torch.float64)) for x in STARTS]
    optimizer = Prodigy(weights, **settings)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rates[min(step, len(rates) - 1)]
        _loss(weights).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [x.item() for x in weights], optimizer.param_groups[0]


def _loss(weights: list[nn.Parameter]) -> Tensor:
    return sum(((x - goal) ** 2).sum() for x, goal in zip(weights, GOALS, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("corrected", [False, True])
def test_steps_are_those_of_the_paper(corrected: bool) -> None:
    beta1, beta2, eps, decay, d0 = 0.8, 0.95, 1e-8, 0.1, 1e-3
    rates = [0.25, 0.5, 1.0]
    x, m, v, s = list(STARTS), [0.0] * 3, [0.0] * 3, [0.0] * 3
    d = largest = d0
    numerator = 0.0
    for k in range(8):
        correction = math.sqrt(1 - beta2 ** (k + 1)) / (1 - beta1 ** (k + 1)) if corrected else 1.0
        rate, now = rates[min(k, 2)] * d * correction, d
        g = [2 * (a - goal) for a, goal in zip(x, GOALS)]
        numerator *= math.sqrt(beta2)
        numerator += d / d0 * rate * sum(a * (start - b) for a, start, b in zip(g, STARTS, x))
        s = [math.sqrt(beta2) * a + d / d0 * (d if corrected else rate) * b for a, b in zip(s, g)]
        found = numerator / sum(map(abs, s))
        largest = max(largest, found)
        d = largest if d == d0 else min(largest, 1.5 * d)
        m = [beta1 * a + (1 - beta1) * now * b for a, b in zip(m, g)]
        v = [beta2 * a + (1 - beta2) * (now * b) ** 2 for a, b in zip(v, g)]
        x = [a * (1 - decay * rate) - rate * b / (math.sqrt(c) + now * eps) for a, b, c in zip(x, m, v)]
    flags = {"use_bias_correction": corrected, "safeguard_warmup": corrected}
    found_x, group = trained(8, rates, betas=(beta1, beta2), weight_decay=decay, d0=d0, growth_rate=1.5, **flags)
    assert d > 1.5 * d0
    assert group["d"] == pytest.approx(d, rel=1e-9)
    assert group["k"] == 8
    assert found_x == pytest.approx(x, rel=1e-9)


def test_it_finds_a_rate_from_a_small_estimate() -> None:
    weights, group = trained(400, [1.0])
    assert weights == pytest.approx(GOALS, abs=0.05)
    assert 0.01 < group["d"] < 10


def test_weights_without_a_gradient_are_left() -> None:
    used, idle = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = Prodigy([used, idle])
    optimizer.step()
    assert optimizer.param_groups[0]["k"] == 0
    used.grad = torch.ones(2)
    optimizer.step()
    assert idle not in optimizer.state
    assert torch.equal(idle, torch.ones(2))
    assert not torch.equal(used, torch.ones(2))


def test_what_is_not_valid_is_refused() -> None:
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    for settings, message in (
        ({"d0": 0.0}, r"d0=0\.0 must be positive"),
        ({"betas": (1.0, 0.9)}, r"betas=\(1\.0, 0\.9\)"),
    ):
        with pytest.raises(ValueError, match=message):
            Prodigy(weights, **settings)
    optimizer = Prodigy([{"params": weights[:1], "lr": 1.0}, {"params": weights[1:], "lr": 0.5}])
    with pytest.raises(ValueError, match=r"Prodigy needs one lr for all parameter groups, got 1\.0, 0\.5"):
        optimizer.step()
