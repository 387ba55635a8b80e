"""Memory and time of the stages of a sample: encode, denoise and decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

from lightning_cp.planning.layouts import shard_ranks
from lightning_cp.planning.pipeline.components import Component, Pipeline, Stage
from lightning_cp.planning.request import Choice, Request, SampleStage
from lightning_cp.planning.step import Step
from lightning_cp.planning.timeline import time_step

Run = Callable[[Component], Step | str]


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
        self.sizes: dict[str, tuple[Stage, int]] = {"transformer": ("denoise", transformer_bytes)}
        for x in pipeline.components:
            parts = shard_ranks(choice.layout, "sample") if x.stage == "denoise" else 1
            self.sizes[x.name] = x.stage, x.weight_bytes(request.dtype) // parts

    def beside(self, stage: Stage, caller: str, peak: dict[str, int]) -> dict[str, int]:
        """Return the peak of a component's call with the weights of all other components on the device."""
        others = (x for name, (of, x) in self.sizes.items() if name != caller and self._is_there(of, stage))
        return {**peak, "weights": peak.get("weights", 0) + sum(others)}

    def _is_there(self, of: Stage, now: Stage) -> bool:
        """Return True if the weights of a stage are on the device in another one."""
        if self._setting == "together":
            return True
        return of == now and (of != "denoise" or self._setting == "release")  # of two experts, one is on the device


def _stage(stage: Stage, request: Request, pipeline: Pipeline, weights: _Weights, run: Run) -> SampleStage:
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
