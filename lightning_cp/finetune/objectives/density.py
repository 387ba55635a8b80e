"""Timestep densities: how often each noise level is trained."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from typing_extensions import override


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
