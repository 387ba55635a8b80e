"""Times of training: the shift of flow matching, and the noise schedules of diffusion schedulers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypedDict, cast

import torch
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


@dataclass(frozen=True)
class ObjectiveDefaults:
    """Training objective that fits a family's pretrained weights.

    Args:
        prediction: `flow`: the transformer predicts noise minus data on a straight path; `v_prediction` and `epsilon`
            as in diffusers' schedulers.
        shift: shift of the flow times: a factor, or a rule that depends on the number of tokens.
        alphas_cumprod: cumulative signal level of each integer time, for `v_prediction` and `epsilon`.
        guidance: value of the guidance embedding in training; None if the transformer has none.
        posterior: `mode` or `sample` of the VAE's latent distribution.
    """

    prediction: Literal["flow", "v_prediction", "epsilon"] = "flow"
    shift: float | ResolutionShift = 1.0
    alphas_cumprod: tuple[float, ...] = field(default=(), repr=False)
    guidance: float | None = None
    posterior: Literal["mode", "sample"] = "mode"


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


class DiffusionFacts(TypedDict):
    """Schedule of a diffusion scheduler as plain values, for `diffusion_defaults`."""

    prediction: Literal["v_prediction", "epsilon"]
    alphas_cumprod: list[float]


def diffusion_facts(scheduler: Any) -> DiffusionFacts:
    """Read the prediction type and the cumulative signal level of each time, index 0 is the cleanest.

    The values are the scheduler's own, so shifts of the signal-to-noise ratio and zero terminal SNR are included.

    Raises: FamilyError: the scheduler has no such schedule, or predicts something else.
    """
    prediction = scheduler.config.get("prediction_type")
    if prediction not in ("v_prediction", "epsilon"):
        raise FamilyError(
            f"{type(scheduler).__name__}: prediction_type={prediction!r} must be 'v_prediction' or 'epsilon'"
        )
    levels = getattr(scheduler, "alphas_cumprod", None)
    if levels is None:
        raise FamilyError(
            f"{type(scheduler).__name__} has no alphas_cumprod: load the pipeline with the scheduler of its checkpoint"
        )
    return {
        "prediction": cast(Literal["v_prediction", "epsilon"], prediction),
        "alphas_cumprod": torch.as_tensor(levels).double().tolist(),
    }


def diffusion_defaults(schedule: DiffusionFacts) -> ObjectiveDefaults:
    """Return the objective of weights that were trained with a schedule."""
    levels = tuple(schedule["alphas_cumprod"])
    return ObjectiveDefaults(prediction=schedule["prediction"], alphas_cumprod=levels, posterior="sample")
