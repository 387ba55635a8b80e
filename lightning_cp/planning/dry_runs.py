"""Dry runs that layouts share: those that differ only in ranks that compute the same on other samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

from lightning_cp.planning.dry_run import ShortModels, dry_run
from lightning_cp.planning.layouts import Task, described
from lightning_cp.planning.models import of_dtype
from lightning_cp.planning.optimizer import OPTIMIZER
from lightning_cp.planning.pipeline.component_run import ComponentRuns
from lightning_cp.planning.pipeline.components import Component
from lightning_cp.planning.recorder import WORLD
from lightning_cp.planning.recording import StepSettings
from lightning_cp.planning.request import Request
from lightning_cp.planning.step import Compute, Layout, Part, Shards, Start, Step, shard_bytes

_LOG = logging.getLogger(__name__)


@dataclass
class DryRuns:
    """The dry runs of requests for one model, which differ in ranks, devices and memory only."""

    _steps: dict[Hashable, Step] = field(default_factory=dict)
    _short_models: ShortModels = field(default_factory=dict)
    _components: ComponentRuns = field(default_factory=ComponentRuns)

    def component(self, request: Request, layout: Layout, component: Component) -> Step | str:
        """Return the call of a component of the pipeline, see `ComponentRuns`."""
        ranks = layout.cfg * layout.ring * layout.ulysses
        return self._components.run(component, ranks, request.device.profile(), request.dtype)

    def step(self, request: Request, layout: Layout) -> Step:
        """Return the step of a layout. Raises: ValueError: see `dry_run`."""
        return on_ranks(self._traced(request, traced_for(layout, request.task)), layout)

    def _traced(self, request: Request, layout: Layout) -> Step:
        profile = request.device.profile()
        # Of the capability, only this changes the kernels of a dry run.
        key = layout, profile.kind, profile.capability >= (8, 0), request.mlp_tiles
        if key not in self._steps:
            _LOG.info("dry run of %s", described(layout))
            self._steps[key] = dry_run(
                request.model.build,
                of_dtype(request.model.inputs, request.dtype),
                layout,
                StepSettings(request.task, request.autocast),
                device=profile,
                dtype=request.dtype,
                lora=request.lora,
                plan=request.plan,
                mlp_tiles=request.mlp_tiles,
                short_models=self._short_models,
            )
        return self._steps[key]


def traced_for(layout: Layout, task: Task) -> Layout:
    """Return the layout to dry-run: with the fewest ranks from which `on_ranks` derives the step of this one."""
    needs_two = task == "train" and layout.ranks > 1 and layout.ring * layout.ulysses == 1
    return replace(layout, data=2 if needs_two else 1, cfg=1)


def on_ranks(step: Step, layout: Layout) -> Step:
    """Return a step as one of another layout that differs in data and CFG ranks only.

    All ranks reduce gradients, and shard weights in training. What depends on their number follows from the sizes of
    the weights: bytes exactly, and memory within 1 %. Operators that copy shards count as those of the dry run.
    """
    before, now = step.layout.ranks, layout.ranks
    if before == now:
        return replace(step, layout=layout)
    if step.shards is not None:
        return _resharded(step, step.shards, layout)
    factor = (now - 1) / now / ((before - 1) / before) if before > 1 else 0.0
    return replace(step, layout=layout, parts=_sending(step.parts, lambda sent: round(sent * factor)))


def _sending(parts: Sequence[Part], sent: Callable[[int], int]) -> tuple[Part, ...]:
    """Return parts with other bytes on the link of all ranks."""
    return tuple(
        replace(
            part,
            events=tuple(
                replace(x, sent_bytes=sent(x.sent_bytes)) if isinstance(x, Start) and x.link == WORLD else x
                for x in part.events
            ),
        )
        for part in parts
    )


def _resharded(step: Step, shards: Shards, layout: Layout) -> Step:
    """Return a step of training with its weights sharded over another number of ranks."""
    before, now = step.layout.ranks, layout.ranks
    sent = {
        shard_bytes(unit, before, trained=x) * (before - 1): shard_bytes(unit, now, trained=x) * (now - 1)
        for unit in shards.units
        for x in (False, True)
    }
    shard_before, shard = (shard_bytes(shards.weights, ranks) for ranks in (before, now))
    padded = shard * now / (shard_before * before)
    share = shard_bytes(shards.weights, now, trained=True) / shard_bytes(shards.weights, before, trained=True)
    parts = [_smaller(x, share) if x.name == OPTIMIZER else x for x in _sending(step.parts, lambda x: sent.get(x, x))]
    peaks = []
    for part, peak in zip(step.parts, step.peaks, strict=True):
        scaled = ("gradients", "optimizer", *(["activations"] if part.name == OPTIMIZER else []))
        changed = {name: round(size * share) if name in scaled else size for name, size in peak.items()}
        gathered = peak["weights"] - shard_before
        peaks.append(changed | {"weights": shard + round(gathered * padded)})
    highest = max(range(len(peaks)), key=lambda i: sum(peaks[i].values()))
    at = step.parts[highest].name
    return replace(step, layout=layout, parts=tuple(parts), peaks=tuple(peaks), peak=peaks[highest], at=at)


def _smaller(part: Part, share: float) -> Part:
    """Return a part with operators on smaller tensors."""
    events = (
        replace(x, flops=round(x.flops * share), moved_bytes=round(x.moved_bytes * share))
        for x in part.events
        if isinstance(x, Compute)
    )
    return replace(part, events=tuple(events))
