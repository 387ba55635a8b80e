"""Shift flow-matching times towards noise, by a constant or by the number of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from lightning_cp.errors import FamilyError


@dataclass(frozen=True)
class ResolutionShift:
    """Shift that grows with the number of tokens (Esser et al., arXiv:2403.03206; `use_dynamic_shifting` in diffusers).

    mu grows linearly from `base_shift` at `base_tokens` to `max_shift` at `max_tokens`. The factor is exp(mu), or mu
    with `exponential=False`. diffusers extrapolates mu above `max_tokens`; then almost every time is 1 (pure noise).

    Args:
        clamp: True: use `max_shift` above `max_tokens`.
    Raises: FamilyError: base_tokens is not below max_tokens.
    """

    base_tokens: int = 256
    max_tokens: int = 4096
    base_shift: float = 0.5
    max_shift: float = 1.15
    exponential: bool = True
    clamp: bool = True

    def __post_init__(self) -> None:
        if not self.base_tokens < self.max_tokens:
            raise FamilyError(f"base_tokens={self.base_tokens} must be below max_tokens={self.max_tokens}")

    def is_clamped(self, tokens: int) -> bool:
        """Return True if the clamp changes the factor for this number of tokens."""
        return self.clamp and tokens > self.max_tokens

    def factor(self, tokens: int) -> float:
        """Return the factor c of sigma -> c·sigma / (1 + (c - 1)·sigma)."""
        used = min(tokens, self.max_tokens) if self.clamp else tokens
        slope = (self.max_shift - self.base_shift) / (self.max_tokens - self.base_tokens)
        mu = self.base_shift + (used - self.base_tokens) * slope
        if self.exponential:
            return math.exp(mu)
        if mu <= 0:
            raise FamilyError(f"the linear timestep shift of {tokens} tokens is {mu:.3g}, it must be positive: {self}")
        return mu


def shift_facts(scheduler: Any) -> float | dict[str, Any]:
    """Read the shift from the config of a flow-matching scheduler, as plain values for `shift_from`.

    `FlowMatchEulerDiscreteScheduler` calls it `shift`, the multistep schedulers `flow_shift`.
    """
    config = scheduler.config
    if config.get("use_dynamic_shifting"):
        return asdict(
            ResolutionShift(
                base_tokens=config.get("base_image_seq_len", 256),
                max_tokens=config.get("max_image_seq_len", 4096),
                base_shift=config.get("base_shift", 0.5),
                max_shift=config.get("max_shift", 1.15),
                exponential=config.get("time_shift_type", "exponential") == "exponential",
            )
        )
    flow_shift = config.get("flow_shift")
    return float(config.get("shift", 1.0) if flow_shift is None else flow_shift)


def shift_from(facts: float | Mapping[str, Any]) -> float | ResolutionShift:
    """Build the shift from `shift_facts`."""
    return ResolutionShift(**facts) if isinstance(facts, Mapping) else float(facts)


def scheduler_times(times: Tensor) -> Tensor:
    """Return sigma in [0, 1] as the scheduler's times in [0, 1000], float32."""
    return (times.double() * 1000).float()
