"""Dry runs that layouts share: those that differ only in ranks that compute the same on other samples."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from lightning_cp.planning.dry_run import dry_run
from lightning_cp.planning.layouts import Task, described
from lightning_cp.planning.models import of_dtype
from lightning_cp.planning.pipeline.component_run import ComponentRuns
from lightning_cp.planning.pipeline.components import Component
from lightning_cp.planning.recording import StepSettings
from lightning_cp.planning.request import Request
from lightning_cp.planning.step import Layout, Part, Start, Step

_LOG = logging.getLogger(__name__)


@dataclass
class DryRuns:
    """The dry runs of requests for one model, which differ in ranks, devices and memory only."""

    _steps: dict[Hashable, Step] = field(default_factory=dict)
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
        key = layout, profile.kind, profile.capability, request.mlp_tiles
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
            )
        return self._steps[key]


def traced_for(layout: Layout, task: Task) -> Layout:
    """Return the layout to dry-run: with the fewest data ranks that give the same step, but for the gradients' sum."""
    if layout.sharded and task == "train":
        return replace(layout, data=layout.data * layout.cfg, cfg=1)
    context = layout.ring * layout.ulysses
    needs_two = task == "train" and layout.ranks > 1 and context == 1
    return replace(layout, data=2 if needs_two else 1, cfg=1)


def on_ranks(step: Step, layout: Layout) -> Step:
    """Return a step as one of another layout that differs in data and CFG ranks only."""
    before, now = step.layout.ranks, layout.ranks
    if before == now or layout.sharded:
        return replace(step, layout=layout)
    factor = (now - 1) / now / ((before - 1) / before) if before > 1 else 0.0

    def scaled(part: Part) -> Part:
        events = (
            replace(x, sent_bytes=round(x.sent_bytes * factor)) if isinstance(x, Start) and x.link == "world" else x
            for x in part.events
        )
        return replace(part, events=tuple(events))

    return replace(step, layout=layout, parts=tuple(map(scaled, step.parts)))
