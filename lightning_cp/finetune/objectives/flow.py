"""Flow matching with straight paths (Lipman et al., arXiv:2210.02747; Liu et al., arXiv:2209.03003)."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_cp.comm.background import numbers_on
from lightning_cp.data import RandomStream, keyed_generator
from lightning_cp.finetune.families import Family, ResolutionShift
from lightning_cp.finetune.objectives.objective import Objective
from lightning_cp.finetune.settings import FlowSettings
from lightning_cp.training.noise import FirstIndex, indices_of


class Density(ABC):
    """A distribution of sigma in (0, 1], before the shift."""

    @abstractmethod
    def draw(self, generator: np.random.Generator) -> float:
        """Draw one sigma."""

    @abstractmethod
    def quantile(self, p: float) -> float:
        """Return the p-quantile: the sigma that a fraction p of the draws is below. Args: p: in (0, 1)."""

    @abstractmethod
    def cdf(self, sigma: float) -> float:
        """Return the fraction of the draws that is at most sigma. Args: sigma: in [0, 1]."""


@dataclass(frozen=True)
class Uniform(Density):
    """Every sigma equally often."""

    @override
    def draw(self, generator: np.random.Generator) -> float:
        return 1.0 - generator.random()  # in (0, 1]

    @override
    def quantile(self, p: float) -> float:
        return p

    @override
    def cdf(self, sigma: float) -> float:
        return sigma


@dataclass(frozen=True)
class LogitNormal(Density):
    """sigmoid of a normal variable (Esser et al., arXiv:2403.03206).

    A positive mean gives more noise. (In diffusers' example scripts it gives less: they count timesteps from the end.)
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if not self.std > 0:
            raise ValueError(f"std={self.std} must be positive")

    @override
    def draw(self, generator: np.random.Generator) -> float:
        normal = float(generator.standard_normal(dtype=np.float32))
        return _sigmoid(self.mean + self.std * normal)

    @override
    def quantile(self, p: float) -> float:
        return _sigmoid(NormalDist(self.mean, self.std).inv_cdf(p))

    @override
    def cdf(self, sigma: float) -> float:
        if not 0 < sigma < 1:
            return float(sigma >= 1)
        return NormalDist(self.mean, self.std).cdf(math.log(sigma) - math.log1p(-sigma))


def shifted(sigma: float, factor: float) -> float:
    """Shift a time towards noise (factor > 1) or data (factor < 1)."""
    return factor * sigma / (1 + (factor - 1) * sigma)


def unshifted(sigma: float, factor: float) -> float:
    """Return the time that `shifted` maps to sigma."""
    return shifted(sigma, 1 / factor)


def _sigmoid(logit: float) -> float:
    if logit >= 0:
        return 1.0 / (1.0 + math.exp(-logit))
    return math.exp(logit) / (1.0 + math.exp(logit))  # exp(-logit) could overflow


_log = logging.getLogger(__name__)
_MOST_DRAWS = 10_000


@dataclass(frozen=True, kw_only=True)
class FlowMatching(FlowSettings, Objective):
    """Train the velocity `noise - x0` at `x = (1 - sigma)·x0 + sigma·noise`.

    Args:
        density: distribution of sigma before the shift.
        shift: factor or rule of the shift; None: the family's, from the pretrained scheduler.
        sigma_range: train only on lowest < sigma <= highest, after the shift. For models with two transformers.
    """

    density: Density = field(default_factory=LogitNormal)

    @override
    def times(self, family: Family, clean: Tensor, *, step: int, first_index: FirstIndex) -> Tensor:
        factor = self._factor(family, clean)
        drawn = [self._draw(factor, step=step, index=i) for i in indices_of(first_index, len(clean))]
        return numbers_on(clean.device, drawn, torch.float32)

    @override
    def times_at(self, family: Family, clean: Tensor, p: float) -> Tensor:
        factor = self._factor(family, clean)
        below, up_to = (self.density.cdf(unshifted(sigma, factor)) for sigma in self.sigma_range)
        if up_to - below < 1 / _MOST_DRAWS:
            raise self._empty_range(f"fewer than 1 of {_MOST_DRAWS} times is", factor)
        within = min(below + p * (up_to - below), math.nextafter(1.0, 0.0))  # the sum may be rounded to 1
        sigma = shifted(self.density.quantile(within), factor)
        return torch.full((len(clean),), sigma, dtype=torch.float32, device=clean.device)

    @override
    def sigma(self, family: Family, times: Tensor) -> Tensor:
        return times

    @override
    def mix(self, family: Family, clean: Tensor, noise: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        if family.objective.prediction != "flow":
            raise ValueError(f"{family.name} predicts {family.objective.prediction}: train it with Diffusion")
        sigma = times.to(clean.dtype).view(-1, *[1] * (clean.dim() - 1))
        return (1 - sigma) * clean + sigma * noise, noise - clean

    def _draw(self, factor: float, *, step: int, index: int) -> float:
        generator = keyed_generator(self.seed, RandomStream.TIME, step=step, index=index)
        low, high = self.sigma_range
        for _ in range(_MOST_DRAWS):
            sigma = shifted(self.density.draw(generator), factor)
            if low < sigma <= high:
                return sigma
        raise self._empty_range(f"none of {_MOST_DRAWS} drawn times is", factor)

    def _empty_range(self, found: str, factor: float) -> ValueError:
        return ValueError(
            f"{found} in sigma_range={self.sigma_range}: widen it, or change the density "
            f"({self.density}) or the shift ({factor:.3g})"
        )

    def _factor(self, family: Family, clean: Tensor) -> float:
        rule = family.shift_for(clean.shape[1:]) if self.shift is None else self.shift
        if not isinstance(rule, ResolutionShift):
            return float(rule)
        tokens = family.grid.tokens(clean.shape[1:])
        if rule.is_clamped(tokens):
            _log_clamp(tokens, rule)
        return rule.factor(tokens)


_logged: set[tuple[int, ResolutionShift]] = set()


def _log_clamp(tokens: int, rule: ResolutionShift) -> None:
    if (tokens, rule) not in _logged:
        _logged.add((tokens, rule))
        _log.warning(
            f"the timestep shift of {tokens} tokens is clamped to that of {rule.max_tokens} tokens "
            f"({rule.factor(tokens):.2f}); set clamp=False in the ResolutionShift to extrapolate"
        )
