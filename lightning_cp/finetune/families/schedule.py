"""Read the noise schedule of diffusion schedulers with integer times."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, cast

import torch

from lightning_cp.errors import FamilyError
from lightning_cp.finetune.families.family import ObjectiveDefaults


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
