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
    with_prefix,
)
from lightning_cp.finetune.family_check.proof import Proof, store
from lightning_cp.finetune.objectives.objective import activation_dtype
from lightning_cp.nest import replace

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
    settings = guidance_settings(pipe, [negative] * len(captions))
    negatives = settings.get("negative_prompt", [""] * len(captions))
    if "guidance_scale" in inspect.signature(pipe.__call__).parameters:
        settings.setdefault("guidance_scale", _GUIDANCE)
    asked = _STEPS + family.counts_end
    record = call(pipe, family, captions, media, num_inference_steps=asked, output_type="latent", **settings)
    positive = store(family, pipe, captions, media)
    texts = family.encode_negative(pipe, negatives, media)
    samples = [positive, [{**sample, **text} for sample, text in zip(positive, texts, strict=True)]]
    per_step = len(record.calls) // _STEPS
    guidance = settings.get("guidance_scale", _GUIDANCE)
    errors: dict[str, float] = {}
    for step in range(_STEPS):
        first = step * per_step
        branches = [_arguments(pipe, family, record, x, step, guidance) for x in samples]
        if (rule := family.components.side) is not None:  # it runs once, with the prompt, for both branches
            steering = {**with_prefix(rule, branches[0][rule.component]), **record.steering[first]}
            branches = [{**x, **steering} for x in branches]
            for x in branches:
                x.pop(rule.component)
        calls = record.calls[first : first + per_step]
        for name, error in _differences(calls, branches, len(captions)):
            if step == 0 or _argument(name) not in family.entries:
                errors[name] = max(errors.get(name, 0.0), error)
    exact = activation_dtype(transformers_of(pipe, family.components)[0]) == torch.float32
    rounded = (*family.entries, family.time_entry, *family.condition_entries)
    allowed = {name: 0.0 if exact or _argument(name) not in rounded else _ROUNDING for name in errors}
    worst = max(errors, key=lambda name: (errors[name] > allowed[name], errors[name]))
    return Proof("capture", errors[worst], allowed[worst], worst if errors[worst] else "")


def _argument(name: str) -> str:
    """Return the name of an argument without its branch and its model."""
    return name.split()[-1].rpartition(".")[2]


def _arguments(
    pipe: Any, family: Family, record: Recording, samples: list[Any], step: int, guidance: float
) -> dict[str, Any]:
    stored = collate(samples, family.text)
    clean, scale = family.clean(stored), getattr(pipe.scheduler, "init_noise_sigma", 1.0)
    noisy = like(clean, {name: noise * scale for name, noise in _noises(record, by_name(clean)).items()})
    times = replace(Tensor, lambda x: x.expand(len(samples)), family.pipeline_times(pipe, step))
    options = InputOptions(activation_dtype(transformers_of(pipe, family.components)[0]), guidance)
    return passed_arguments(family.inputs(noisy, times, stored, options))


def _noises(record: Recording, clean: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the noises that the pipeline began from, in x0's layout; they were drawn in x0's order.

    Their values are ordered as in x0's layout, apart from dims of size 1.
    """
    found, left = {}, list(record.noises)
    for name, x in reversed(clean.items()):
        while left and left[-1].numel() != x.numel():
            left.pop()
        assert left, "the pipeline draws noise of x0's size"
        found[name] = left.pop().float().reshape(x.shape)
    return found


def _differences(calls: list[dict[str, Any]], branches: list[dict[str, Any]], samples: int) -> list[tuple[str, float]]:
    """Compare recorded calls with the family's arguments. Each CFG branch is a separate call, or half of a batch."""
    positive, negative = branches
    if len(calls) >= 2:
        return [*_compared("", calls[0], positive), *_compared("negative ", calls[1], negative)]
    orders = [[positive]]
    if any(_length(x) == 2 * samples for x in calls[0].values()):
        orders = [[negative, positive], [positive, negative]]  # pipelines join the branches in one of these orders
    found = [_compared("", calls[0], _joined(calls[0], order)) for order in orders]
    return min(found, key=lambda errors: max(error for _, error in errors))


def _compared(branch: str, recorded: dict[str, Any], ours: dict[str, Any]) -> list[tuple[str, float]]:
    names = sorted(recorded.keys() | ours.keys())
    return [(f"{branch}{name}", _error(recorded.get(name), ours.get(name))) for name in names]


def _joined(recorded: dict[str, Any], branches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return all branches in one batch for the arguments that have all of them, otherwise the last one's."""
    joined = dict(branches[-1])
    for name, x in joined.items():
        if _length(x) and _length(recorded.get(name)) == len(branches) * _length(x):
            parts = [branch[name] for branch in branches]
            joined[name] = torch.cat(parts) if isinstance(x, Tensor) else [one for part in parts for one in part]
    return joined


def _length(x: Any) -> int:
    """Return the length of the batch dim of a tensor, or of a list with one tensor for each sample; otherwise 0."""
    is_batch = x.dim() > 0 if isinstance(x, Tensor) else isinstance(x, list) and all(isinstance(y, Tensor) for y in x)
    return len(x) if is_batch else 0


def _error(recorded: Any, ours: Any) -> float:
    """Return the largest difference, relative to the largest recorded value; inf for other shapes or kinds."""
    if isinstance(recorded, (tuple, list)) and isinstance(ours, (tuple, list)) and len(recorded) == len(ours):
        return max((_error(a, b) for a, b in zip(recorded, ours, strict=True)), default=0.0)
    if isinstance(recorded, float) and isinstance(ours, Tensor):  # a value of the call, which samples here have each
        recorded = torch.full_like(ours, recorded)
    if not isinstance(recorded, Tensor) or not isinstance(ours, Tensor):
        return 0.0 if type(recorded) is type(ours) and recorded == ours else float("inf")
    if recorded.shape != ours.shape:
        return float("inf")
    a, b = recorded.double(), ours.double()
    scale = float(a.abs().max()) if a.numel() else 1.0
    return float((a - b).abs().max()) / (scale or 1.0) if a.numel() else 0.0
