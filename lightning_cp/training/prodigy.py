"""Prodigy: Adam that finds its learning rate, on whole or sharded weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cp.training.ema import full_tensor


class Prodigy(Optimizer):
    """Adam with a learning rate that is estimated from the gradients and the distance from the first weights.

    The estimate `d` is the same for all weights; it and the step count are values of the parameter groups. All sums
    over weights are computed on all ranks that hold a shard: with sharded weights, a step is that of whole ones.

    Args:
        params: parameters, or parameter groups with equal settings.
        lr: factor of the estimate, for warm-up and schedules; leave its largest value at 1.
        betas: decay rates of the averages of gradients and their squares.
        eps: added to the root of the average of squares, times the estimate.
        weight_decay: decoupled weight decay.
        d0: first estimate.
        d_coef: factor of all estimates: 2 trains faster, 0.5 more slowly.
        growth_rate: largest factor by which the estimate grows in a step; None: any.
        use_bias_correction: correct the averages of the first steps, as Adam does.
        safeguard_warmup: keep `lr` out of the denominator of the estimate, so that a warm-up does not raise it.
    Source: Mishchenko and Defazio, arXiv:2306.06101, algorithm 4.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1.0,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        d0: float = 1e-6,
        d_coef: float = 1.0,
        growth_rate: float | None = None,
        use_bias_correction: bool = False,
        safeguard_warmup: bool = False,
    ) -> None:
        positive = {
            "lr": lr,
            "eps": eps,
            "d0": d0,
            "d_coef": d_coef,
            "growth_rate": 1.0 if growth_rate is None else growth_rate,
        }
        for name, value in positive.items():
            if not value > 0:
                raise ValueError(f"{name}={value} must be positive")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas} must be at least 0 and less than 1")
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "d0": d0, "d_coef": d_coef}
        flags = {"use_bias_correction": use_bias_correction, "safeguard_warmup": safeguard_warmup}
        estimates = {"d": d0, "d_max": d0, "d_numerator": 0.0, "k": 0}
        super().__init__(params, {**settings, "growth_rate": growth_rate, **flags, **estimates})

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights and the estimate. Ranks: all that hold a shard of the weights."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = self.param_groups[0]
        if any(group["lr"] != first["lr"] for group in self.param_groups):
            rates = ", ".join(str(group["lr"]) for group in self.param_groups)
            raise ValueError(f"Prodigy needs one lr for all parameter groups, got {rates}")
        numerator, denominator = self._sums(first)
        if not denominator:
            return loss  # no gradients yet
        estimates = _estimates(first, numerator, denominator)
        for group in self.param_groups:
            self._update(group, rate=_rate(first))
        for group in self.param_groups:
            group.update(estimates)
        return loss

    def _sums(self, first: dict[str, Any]) -> tuple[float, float]:
        """Update the averages, and return the terms of the estimate: of this step, and of all steps."""
        beta1, beta2 = first["betas"]
        d, scale = first["d"], first["d"] / first["d0"]
        rate = _rate(first)
        sums: list[Tensor] = []
        for x, state in self._trained():
            grad = x.grad
            sums.append((grad * (state["p0"] - x)).sum(dtype=torch.float64) * (scale * rate))
            state["exp_avg"].mul_(beta1).add_(grad, alpha=d * (1 - beta1))
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=d * d * (1 - beta2))
            state["s"].mul_(beta2**0.5).add_(grad, alpha=scale * (d if first["safeguard_warmup"] else rate))
            sums.append(state["s"].abs().sum(dtype=torch.float64))
        if not sums:
            return 0.0, 0.0
        numerator, denominator = (full_tensor(torch.stack(part).sum()) for part in (sums[::2], sums[1::2]))
        found: list[float] = torch.stack((numerator, denominator)).tolist()  # one wait for the device
        return found[0], found[1]

    def _trained(self) -> Iterable[tuple[Any, dict[str, Any]]]:
        """Yield each weight that has a gradient, with its state."""
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is None:
                    continue
                state = self.state[x]
                if not state:
                    state["p0"] = x.detach().clone()
                    for name in ("exp_avg", "exp_avg_sq", "s"):
                        state[name] = torch.zeros_like(x)
                yield x, state

    def _update(self, group: dict[str, Any], *, rate: float) -> None:
        for x in group["params"]:
            if x.grad is None:
                continue
            state = self.state[x]
            x.mul_(1 - group["weight_decay"] * rate)
            x.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["d"] * group["eps"]), value=-rate)


def _rate(group: dict[str, Any]) -> float:
    """Return the learning rate of a step: the estimate, times `lr` and the bias correction."""
    (beta1, beta2), k = group["betas"], group["k"] + 1
    correction = (1 - beta2**k) ** 0.5 / (1 - beta1**k) if group["use_bias_correction"] else 1.0
    return float(group["d"] * group["lr"] * correction)


def _estimates(group: dict[str, Any], numerator: float, denominator: float) -> dict[str, float]:
    """Return the values of the parameter groups after a step."""
    d, total = group["d"], group["d_numerator"] * group["betas"][1] ** 0.5 + numerator
    found = group["d_coef"] * total / denominator
    d = max(d, found) if d == group["d0"] else d
    largest, growth = max(group["d_max"], found), group["growth_rate"]
    d = largest if growth is None else min(largest, d * growth)
    return {"d": d, "d_max": largest, "d_numerator": total, "k": group["k"] + 1}
