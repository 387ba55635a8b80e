"""Capture: the pipeline's first step and the family must give the transformer the same arguments."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cp.finetune.families import Family, InputOptions, Media, collate
from lightning_cp.finetune.families.latents import by_name, like
from lightning_cp.finetune.family_check.pipeline_calls import (
    Recording,
    call,
    guidance_settings,
    passed_arguments,
    transformers_of,
)
from lightning_cp.finetune.family_check.proof import Proof, store
from lightning_cp.finetune.objectives.objective import activation_dtype

# Arguments that may differ in bfloat16, by two roundings: pipelines normalise conditions (a part of the hidden states)
# in bfloat16, and Flux and QwenImage round times and then divide them. All other arguments must be equal.
_ROUNDING = 2.0**-7
_GUIDANCE = 3.5  # of transformers with a guidance embedding
_STEPS = 2


def capture_proof(
    pipe: Any, family: Family, captions: Sequence[str], media: Media, *, negative: str = "blurred"
) -> Proof:
    """Compare the transformer's arguments in the pipeline's first steps with `family.inputs`, for both CFG branches.

    The family is given the noise that the pipeline drew and the pipeline's times. The noisy latents are compared in the
    first step only. Values must be equal bit for bit. With a transformer in bfloat16, times and hidden states may
    differ by two roundings, because pipelines normalise conditions and scale times in that dtype.
    """
    negatives = [negative] * len(captions)
    settings = guidance_settings(pipe, negatives)
    if "guidance_scale" in inspect.signature(pipe.__call__).parameters:
        settings.setdefault("guidance_scale", _GUIDANCE)
    record = call(pipe, family, captions, media, num_inference_steps=_STEPS, output_type="latent", **settings)
    positive = store(family, pipe, captions, media)
    texts = family.encode_negative(pipe, negatives, media)
    samples = [positive, [{**sample, **text} for sample, text in zip(positive, texts, strict=True)]]
    per_step = len(record.calls) // _STEPS
    guidance = settings.get("guidance_scale", _GUIDANCE)
    errors: dict[str, float] = {}
    for step in range(_STEPS):
        branches = [_arguments(pipe, family, record, x, step, guidance) for x in samples]
        calls = record.calls[step * per_step : (step + 1) * per_step]
        for name, error in _differences(calls, branches, len(captions)):
            if step == 0 or name.split()[-1] not in family.entries:
                errors[name] = max(errors.get(name, 0.0), error)
    exact = activation_dtype(transformers_of(pipe, family.components)[0]) == torch.float32
    rounded = (*family.entries, family.time_entry)
    allowed = {name: 0.0 if exact or name.split()[-1] not in rounded else _ROUNDING for name in errors}
    worst = max(errors, key=lambda name: (errors[name] > allowed[name], errors[name]))
    return Proof("capture", errors[worst], allowed[worst], worst if errors[worst] else "")


def _arguments(
    pipe: Any, family: Family, record: Recording, samples: list[Any], step: int, guidance: float
) -> dict[str, Any]:
    stored = collate(samples, family.text)
    clean, scale = family.clean(stored), getattr(pipe.scheduler, "init_noise_sigma", 1.0)
    noisy = like(clean, {name: _noise(record, x) * scale for name, x in by_name(clean).items()})
    times = _times(pipe, family, step, len(samples))
    options = InputOptions(activation_dtype(transformers_of(pipe, family.components)[0]), guidance)
    return passed_arguments(family.inputs(noisy, times, stored, options))


def _times(pipe: Any, family: Family, step: int, samples: int) -> Tensor:
    """Return the time of a step of the pipeline in the form that `Family.inputs` takes, [samples]."""
    time = pipe.scheduler.timesteps[step]
    if family.objective.prediction != "flow":
        integers: Tensor = time.long().expand(samples)
        return integers
    sigmas: Tensor = (time.double() / pipe.scheduler.config.num_train_timesteps).expand(samples)
    return sigmas


def _noise(record: Recording, clean: Tensor) -> Tensor:
    """Return the noise that the pipeline began from, in x0's layout.

    Its values are ordered as in x0's layout, apart from dims of size 1.
    """
    found = [noise for noise in record.noises if noise.numel() == clean.numel()]
    assert found, "the pipeline draws noise of x0's size"
    return found[-1].float().reshape(clean.shape)


def _differences(calls: list[dict[str, Any]], branches: list[dict[str, Any]], samples: int) -> list[tuple[str, float]]:
    """Compare recorded calls with the family's arguments. Each CFG branch is a separate call, or half of a batch."""
    positive, negative = branches
    if len(calls) >= 2:
        pairs = [("", calls[0], positive), ("negative ", calls[1], negative)]
    elif any(isinstance(x, Tensor) and x.shape[:1] == (2 * samples,) for x in calls[0].values()):
        joined = {name: _joined(calls[0].get(name), negative[name], positive[name]) for name in positive}
        pairs = [("", calls[0], joined)]
    else:
        pairs = [("", calls[0], positive)]
    return [
        (f"{branch}{name}", _error(recorded.get(name), ours.get(name)))
        for branch, recorded, ours in pairs
        for name in sorted(recorded.keys() | ours.keys())
    ]


def _joined(recorded: Any, negative: Any, positive: Any) -> Any:
    """Return both branches in one batch if the recorded tensor has both, otherwise the positive one."""
    tensors = isinstance(recorded, Tensor) and isinstance(positive, Tensor) and recorded.dim() == positive.dim() > 0
    return torch.cat([negative, positive]) if tensors and len(recorded) == 2 * len(positive) else positive


def _error(recorded: Any, ours: Any) -> float:
    """Return the largest difference, relative to the largest recorded value; inf for other shapes or kinds."""
    if isinstance(recorded, (tuple, list)) and isinstance(ours, (tuple, list)) and len(recorded) == len(ours):
        return max((_error(a, b) for a, b in zip(recorded, ours, strict=True)), default=0.0)
    if not isinstance(recorded, Tensor) or not isinstance(ours, Tensor):
        return 0.0 if type(recorded) is type(ours) and recorded == ours else float("inf")
    if recorded.shape != ours.shape:
        return float("inf")
    a, b = recorded.double(), ours.double()
    scale = float(a.abs().max()) if a.numel() else 1.0
    return float((a - b).abs().max()) / (scale or 1.0) if a.numel() else 0.0
