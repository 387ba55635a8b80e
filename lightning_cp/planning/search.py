"""Choose a layout: dry-run those that may fit, compute their times, and take the simplest one of the best.

In sampling, memory and time of encode and decode are added.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from lightning_cp.engine.apply import NoPlanError
from lightning_cp.finetune.adapters.lora import add_lora
from lightning_cp.pipelines.placement.sharding import layers_with_weights
from lightning_cp.planning.components import Component, ComponentRuns, ComponentStage, Pipeline
from lightning_cp.planning.devices import GB
from lightning_cp.planning.dry_run import ShortModels, UntraceableError, dry_run
from lightning_cp.planning.layouts import LEVELS, described, layouts, problem_of, shard_ranks, simplicity
from lightning_cp.planning.models import of_dtype
from lightning_cp.planning.recording import StepSettings
from lightning_cp.planning.request import Choice, Excluded, Request, SampleStage, SearchResult, closest
from lightning_cp.planning.step import Layout, Step
from lightning_cp.planning.timeline import time_step

_LOG = logging.getLogger(__name__)
OF_EVERY_LAYOUT = (NoPlanError, UntraceableError)  # errors of a dry run that no layout would avoid
CLASS = 1.15  # choices within this factor of the best cannot be ordered by predictions
_ADVICE = {
    "train": "Try lora.rank=16, mlp_tiles=auto, a smaller batch_size or size, or more ranks",
    "sample": "Try stages=offload, pipe.vae.enable_tiling(), a smaller size, or more ranks",
}
Run = Callable[[Component], Step | str]


def search(request: Request) -> SearchResult:
    """Search all layouts of the ranks.

    Raises: ValueError: the model has no plan, its forward cannot be traced, or no layout is possible for it.
    """
    trial = _Search(request)
    searched = list(layouts(request.ranks, request.task, request.fixed))
    if not searched:
        raise ValueError(f"fixed={dict(request.fixed)}: no layout of {request.ranks} ranks has these degrees")
    for layout in searched:
        trial.visit(layout)
    if not trial.choices and not any(x.needs_bytes for x in trial.excluded):
        first = trial.excluded[0]
        raise ValueError(f"no layout of {request.ranks} ranks is possible: {described(first.layout)}: {first.reason}")
    choices, equal = ranked(trial.choices)
    reason = why(choices, equal, request) if choices else trial.what_is_missing()
    return SearchResult(request, choices, equal, tuple(trial.excluded), reason)


def ranked(choices: Iterable[Choice]) -> tuple[tuple[Choice, ...], int]:
    """Sort choices by time; those within 15 % of the fastest by simplicity. Returns: also the number of those."""
    by_time = sorted(choices, key=attrgetter("sample_s"))
    equal = [x for x in by_time if x.sample_s <= CLASS * by_time[0].sample_s]
    equal.sort(key=lambda x: (simplicity(x.layout), x.sample_s))
    return (*equal, *by_time[len(equal) :]), len(equal)


@dataclass
class _Search:
    request: Request
    choices: list[Choice] = field(default_factory=list)
    excluded: list[Excluded] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._seen: dict[Layout, Choice] = {}  # all that were dry-run, also those that do not fit
        self._steps: dict[Layout, Step] = {}
        self._short_models: ShortModels = {}
        self._components = ComponentRuns(self.request.device.profile(), self.request.dtype)
        with torch.device("meta"):
            model: Any = self.request.model.build()
        if self.request.lora is not None:
            add_lora(model, self.request.lora)
        can_checkpoint = getattr(model, "_supports_gradient_checkpointing", True)  # diffusers raises a ValueError
        self.can_checkpoint = hasattr(model, "enable_gradient_checkpointing") and can_checkpoint
        elements = [(x.numel(), x.requires_grad) for x in model.parameters()]
        size = self.request.dtype.itemsize
        trains = self.request.task == "train"
        weights = sum(count for count, _ in elements) * size
        # Weights that every rank holds: sampling shards those of layers only.
        layers = {x for layer in layers_with_weights(model) for x in layer.parameters()}
        self._whole = 0 if trains else weights - size * sum(x.numel() for x in layers)
        self._weights, self._buffers = weights, sum(x.numel() * x.element_size() for x in model.buffers())
        # Weights; gradients and two states of AdamW of those that are trained.
        self._fixed: float = weights + 3 * trains * size * sum(count for count, trained in elements if trained)
        pipeline = self.request.pipeline if self.request.stages == "together" else None
        others = [x for x in pipeline.components if x.stage != "denoise"] if pipeline else []
        self._others = sum(x.weight_bytes(self.request.dtype) for x in others)  # of encoders and VAE, not sharded

    def visit(self, layout: Layout) -> None:
        """Dry-run a layout, unless it is clear without it that it cannot be the best, or does not fit."""
        found = problem_of(layout, self.request.model)
        if layout.checkpointing != "none" and not self.can_checkpoint:
            found = "the model has no activation checkpointing"
        if found is not None:
            self.excluded.append(Excluded(layout, found))
            return
        needed = self.least_bytes(layout)
        if needed > self.request.available:
            self._too_large(layout, needed, is_least=True)
            return
        slow = self._is_slow(layout)
        if slow is not None:
            self.excluded.append(Excluded(layout, slow))
            return
        try:
            choice = self.run(layout)
        except OF_EVERY_LAYOUT:
            raise
        except ValueError as error:
            self.excluded.append(Excluded(layout, " ".join(str(error).split())))
            return
        if choice.peak_bytes > self.request.available:
            self._too_large(layout, choice.peak_bytes, stage=choice.stage)
        else:
            self.choices.append(choice)

    def run(self, layout: Layout) -> Choice:
        """Dry-run a layout, and compute its time."""
        request = self.request
        step = self._step(layout)
        times = time_step(step, request.device)
        samples = request.batch_size * (layout.data if request.task == "train" else 1)
        seconds = times.seconds * request.forwards(layout) / samples
        choice = Choice(layout, times, seconds, step.peak, step.flops, step.sent_bytes())
        if request.pipeline is not None:
            sharded = (self._weights - self._whole) // shard_ranks(layout, request.task)
            transformer_bytes = self._whole + sharded + self._buffers
            ranks = layout.cfg * layout.ring * layout.ulysses
            run = partial(self._components.run, ranks=ranks)
            choice = with_stages(choice, request, request.pipeline, transformer_bytes, run)
        self._seen[layout] = choice
        return choice

    def _step(self, layout: Layout) -> Step:
        """Dry-run a layout. In sampling, data and CFG ranks do the same on other samples and other branches."""
        request, traced = self.request, layout
        if request.task == "sample":
            traced = replace(layout, data=1, cfg=1)
        if traced not in self._steps:
            _LOG.info("dry run of %s", described(traced))
            self._steps[traced] = dry_run(
                request.model.build,
                of_dtype(request.model.inputs, request.dtype),
                traced,
                StepSettings(request.task, request.autocast),
                device=request.device.profile(),
                dtype=request.dtype,
                lora=request.lora,
                plan=request.plan,
                mlp_tiles=request.mlp_tiles,
                short_models=self._short_models,
            )
        return replace(self._steps[traced], layout=layout)

    def what_is_missing(self) -> str:
        """Return how much memory the layout lacks that needs the least, and what usually helps."""
        request, found = self.request, closest(self.excluded)
        least, stage = "at least " if found.is_least else "", f" to {found.stage}" if found.stage else ""
        missing = f"{least}{request.missing_gb(found):.3g} GB more than {request.memory:.4g} GB{stage}"
        return f"nothing fits: {described(found.layout)} needs {missing}. {_ADVICE[request.task]}"

    def _too_large(self, layout: Layout, needed: float, *, stage: str = "", is_least: bool = False) -> None:
        request = self.request
        total = needed / GB + request.reserved_gb
        least, to = "at least " if is_least else "", f" to {stage}" if stage else ""
        reason = f"needs {least}{total:.4g} GB of {request.memory:.4g} GB{to}"
        self.excluded.append(Excluded(layout, reason, needed, stage, is_least))

    def least_bytes(self, layout: Layout) -> float:
        """Return a lower bound of the memory.

        Weights, gradients and optimizer states are known. A context of n ranks divides activations by at most n.
        """
        fixed = self._whole + (self._fixed - self._whole) / shard_ranks(layout, self.request.task) + self._others
        one = replace(layout, data=layout.data * layout.ring * layout.ulysses, ring=1, ulysses=1)
        seen = self._seen.get(one)
        if seen is None or one == layout:
            return fixed
        activations = seen.peak["activations"] / (layout.ring * layout.ulysses)
        return max(fixed, seen.peak_bytes - seen.peak["activations"] + activations)

    def _is_slow(self, layout: Layout) -> str | None:
        """Return why a layout cannot be better than those that were dry-run; None if it can."""
        fits = [x.layout for x in self.choices]
        if layout.sharded and replace(layout, sharded=False, checkpointing="none") in fits:
            return "not needed: the weights fit replicated"
        for level in LEVELS[: _level(layout)]:
            if replace(layout, checkpointing=level) in fits:
                return f"not needed: checkpointing {level} fits"
        best = min((x.sample_s for x in self.choices), default=0.0)
        without = [self._seen.get(replace(layout, checkpointing=level)) for level in LEVELS]
        floor = max((x.sample_s for x in without if x is not None), default=0.0)
        if best and floor > CLASS * best:
            return f"slower than others already without checkpointing ({floor / best:.1f} times)"
        smaller = [x for x in self.choices if _divides(x.layout, layout)]
        # Larger degrees never give more samples per second, but a sample can be faster on more nodes than on two.
        factor = 1.0 if self.request.task == "train" else CLASS
        for x in smaller:
            is_lighter = x.layout.sharded <= layout.sharded and _level(x.layout) <= _level(layout)
            if is_lighter and any(x.sample_s > factor * y.sample_s for y in smaller if _divides(y.layout, x.layout)):
                return f"ring {x.layout.ring} × ulysses {x.layout.ulysses} is already slower than smaller degrees"
        return None


def _divides(a: Layout, b: Layout) -> bool:
    """Return True if the context degrees of `a` are smaller and divide those of `b`, and other degrees are equal."""
    divides = b.ring % a.ring == 0 and b.ulysses % a.ulysses == 0
    return divides and (a.ring, a.ulysses) != (b.ring, b.ulysses) and (a.cfg, a.pipe) == (b.cfg, b.pipe)


def _level(layout: Layout) -> int:
    return LEVELS.index(layout.checkpointing)


def why(choices: Sequence[Choice], equal: int, request: Request) -> str:
    """Return why the first of ranked choices is used, in one line."""
    best = choices[0]
    names = {"compute": "compute", "host": "the host, which launches"}
    bound = names.get(best.times.bound, f"the links of {best.times.bound}")
    share = best.times.by_bound[best.times.bound] / best.times.seconds
    others = f"the simplest of {equal} within 15 % of the fastest" if equal > 1 else "the fastest by more than 15 %"
    if len(choices) == 1:
        others = "the only one that fits"
    used = best.peak_bytes / GB + request.reserved_gb
    return (
        f"{described(best.layout)}: {others}, bound by {bound} ({share:.0%} of the time), "
        f"{used:.1f} of {request.memory:g} GB"
    )


def with_stages(choice: Choice, request: Request, pipeline: Pipeline, transformer_bytes: int, run: Run) -> Choice:
    """Return a choice with all stages of a sample. Its peak is that of the stage with the highest one.

    Args:
        choice: a forward of the transformer.
        transformer_bytes: weights of the transformer on a rank.
        run: dry-runs a component, or returns why that is not possible.
    """
    weights = _Weights(choice, request, pipeline, transformer_bytes)
    denoise = SampleStage("denoise", choice.peak, choice.times.seconds * request.forwards(choice.layout))
    stages = (
        _stage("encode", request, pipeline, weights, run),
        replace(denoise, peak=weights.beside("denoise", "transformer", choice.peak)),
        _stage("decode", request, pipeline, weights, run),
    )
    highest = max(stages, key=attrgetter("peak_bytes"))
    return replace(choice, peak=highest.peak, stages=stages)


class _Weights:
    """Weights of all components on a rank, in bytes."""

    def __init__(self, choice: Choice, request: Request, pipeline: Pipeline, transformer_bytes: int) -> None:
        self._setting = request.stages
        self.sizes: dict[str, tuple[ComponentStage, int]] = {"transformer": ("denoise", transformer_bytes)}
        for x in pipeline.components:
            parts = shard_ranks(choice.layout, "sample") if x.stage == "denoise" else 1
            self.sizes[x.name] = x.stage, x.weight_bytes(request.dtype) // parts

    def beside(self, stage: ComponentStage, caller: str, peak: dict[str, int]) -> dict[str, int]:
        """Return the peak of a component's call with the weights of all other components on the device."""
        others = (x for name, (of, x) in self.sizes.items() if name != caller and self._is_there(of, stage))
        return {**peak, "weights": peak.get("weights", 0) + sum(others)}

    def _is_there(self, of: ComponentStage, now: ComponentStage) -> bool:
        """Return True if the weights of a stage are on the device in another one."""
        if self._setting == "together":
            return True
        return of == now and (of != "denoise" or self._setting == "release")  # of two experts, one is on the device


def _stage(stage: ComponentStage, request: Request, pipeline: Pipeline, weights: _Weights, run: Run) -> SampleStage:
    found = SampleStage(stage, weights.beside(stage, "", {}), 0.0)
    for component in pipeline.components:
        if component.stage != stage:
            continue
        step = run(component) if component.inputs is not None else f"the inputs of {component.name} are not known"
        if isinstance(step, str):
            found = replace(found, problems=(*found.problems, f"{step}: only its weights are counted"))
            continue
        peak = weights.beside(stage, component.name, step.peak)
        calls = 2 if stage == "encode" and request.model.guided else 1  # of the prompt and the negative prompt
        seconds = found.seconds + calls * time_step(step, request.device).seconds
        found = replace(found, peak=max(found.peak, peak, key=lambda x: sum(x.values())), seconds=seconds)
    return found
