"""Diffusion with integer times: epsilon prediction (arXiv:2006.11239) and v-prediction (arXiv:2202.00512)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cp.comm.background import numbers_on
from lightning_cp.data import RandomStream, keyed_generator
from lightning_cp.finetune.families import Family
from lightning_cp.finetune.objectives.objective import Objective
from lightning_cp.finetune.settings import DiffusionSettings
from lightning_cp.training.noise import FirstIndex, indices_of


@dataclass(frozen=True, kw_only=True)
class Diffusion(DiffusionSettings, Objective):
    """Train noise or velocity at `x = sqrt(a_t)·x0 + sqrt(1 - a_t)·noise`, t uniform.

    a_t is the scheduler's `alphas_cumprod`, and its `prediction_type` selects the target. By default, the loss is
    unweighted. For v-prediction that is the published loss of CogVideoX: (x0 error)² / (1 - a_t) equals (v error)².

    Args:
        time_range: train only on lowest <= t < highest; None: all times of the scheduler.
    """

    @override
    def times(self, family: Family, clean: Tensor, *, step: int, first_index: FirstIndex) -> Tensor:
        low, high = self._range(family)
        drawn = [
            int(keyed_generator(self.seed, RandomStream.TIME, step=step, index=i).integers(low, high))
            for i in indices_of(first_index, len(clean))
        ]
        return numbers_on(clean.device, drawn, torch.int64)

    @override
    def times_at(self, family: Family, clean: Tensor, p: float) -> Tensor:
        low, high = self._range(family)
        time = min(low + int(p * (high - low)), high - 1)  # the product may be rounded up
        return torch.full((len(clean),), time, dtype=torch.int64, device=clean.device)

    @override
    def sigma(self, family: Family, times: Tensor) -> Tensor:
        levels = numbers_on(times.device, family.objective.alphas_cumprod, torch.float32)
        return (1 - levels[times]).sqrt()

    @override
    def mix(self, family: Family, clean: Tensor, noise: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        defaults = family.objective
        if defaults.prediction == "flow":
            raise ValueError(f"{family.name} predicts a flow: train it with FlowMatching")
        levels = numbers_on(clean.device, defaults.alphas_cumprod, torch.float32)
        level = levels[times].view(-1, *[1] * (clean.dim() - 1))
        signal, sigma = level.sqrt(), (1 - level).sqrt()
        noisy = signal * clean + sigma * noise
        return noisy, noise if defaults.prediction == "epsilon" else signal * noise - sigma * clean

    def _range(self, family: Family) -> tuple[int, int]:
        number = len(family.objective.alphas_cumprod)
        low, high = self.time_range or (0, number)
        if high > number:
            raise ValueError(f"time_range={self.time_range} must be (lowest, highest) within (0, {number})")
        return low, high
