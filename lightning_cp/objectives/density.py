"""Timestep densities: how often each noise level is trained."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from typing_extensions import override


class Density(ABC):
    """A distribution of sigma in (0, 1], before the shift."""

    @abstractmethod
    def draw(self, generator: np.random.Generator) -> float:
        """Draw one sigma."""


@dataclass(frozen=True)
class Uniform(Density):
    """Every sigma equally often."""

    @override
    def draw(self, generator: np.random.Generator) -> float:
        return 1.0 - generator.random()  # in (0, 1]


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
        logit = self.mean + self.std * normal
        if logit >= 0:
            return 1.0 / (1.0 + math.exp(-logit))
        return math.exp(logit) / (1.0 + math.exp(logit))  # exp(-logit) could overflow


def shifted(sigma: float, factor: float) -> float:
    """Shift a time towards noise (factor > 1) or data (factor < 1)."""
    return factor * sigma / (1 + (factor - 1) * sigma)
