"""Choose a layout: dry-run those that may fit, compute their times, and take the simplest one of the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch

from lightning_cp.finetune.adapters.lora import LoraSettings, add_lora
from lightning_cp.planning.devices import GB
from lightning_cp.planning.dry_runs import DryRuns
from lightning_cp.planning.layouts import LEVELS, described, layouts, problem_of, simplicity
from lightning_cp.planning.request import Choice, Excluded, Plan, Request, closest
from lightning_cp.planning.step import Checkpointing, Layout
from lightning_cp.planning.timeline import time_step

CLASS = 1.15  # choices within this factor of the best cannot be ordered by predictions


def plan(request: Request, runs: DryRuns | None = None, *, advise: bool = True) -> Plan:
    """Search all layouts of the ranks.

    Args:
        runs: dry runs that are shared with other requests for the same model; None: not shared.
        advise: if nothing fits, search a change that would.

    Raises: ValueError: the model has no plan, its forward cannot be traced, or no layout is possible for it.
    """
    search = _Search(request, runs or DryRuns())
    searched = list(layouts(request.ranks, request.task, request.fixed))
    if not searched:
        raise ValueError(f"fixed={dict(request.fixed)}: no layout of {request.ranks} ranks has these degrees")
    for layout in searched:
        search.visit(layout)
    if not search.choices and not any(x.needs_bytes for x in search.excluded):
        first = search.excluded[0]
        raise ValueError(f"no layout of {request.ranks} ranks is possible: {described(first.layout)}: {first.reason}")
    choices, equal = ranked(search.choices)
    reason = why(choices, equal, request) if choices else _what_is_missing(search, advise=advise)
    return Plan(request, choices, equal, tuple(search.excluded), reason)


def is_of_every_layout(error: ValueError) -> bool:
    """Return True for an error of a dry run that no layout would avoid: the model cannot be traced, or has no plan."""
    return any(text in str(error) for text in ("cannot be traced", "no plan is registered"))


def predicted(request: Request, layout: Layout) -> Choice:
    """Dry-run one layout, and compute its time. Raises: ValueError: see `dry_run`."""
    return _Search(request, DryRuns()).run(layout)


def ranked(
    choices: Iterable[Choice], *, within: float = CLASS, seconds: Callable[[Choice], float] = attrgetter("sample_s")
) -> tuple[tuple[Choice, ...], int]:
    """Sort choices by time; those within a factor of the fastest by simplicity. Returns: also the number of those."""
    by_time = sorted(choices, key=seconds)
    equal = [x for x in by_time if seconds(x) <= within * seconds(by_time[0])]
    equal.sort(key=lambda x: (simplicity(x.layout), seconds(x)))
    return (*equal, *by_time[len(equal) :]), len(equal)


@dataclass
class _Search:
    request: Request
    runs: DryRuns
    choices: list[Choice] = field(default_factory=list)
    excluded: list[Excluded] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._seen: dict[Layout, Choice] = {}  # all that were dry-run, also those that do not fit
        with torch.device("meta"):
            model: Any = self.request.model.build()
        if self.request.lora is not None:
            add_lora(model, self.request.lora)
        self.can_checkpoint = hasattr(model, "enable_gradient_checkpointing")
        elements = [(x.numel(), x.requires_grad) for x in model.parameters()]
        size = self.request.dtype.itemsize
        trains = self.request.task == "train"
        weights = sum(count for count, _ in elements) * size
        # Weights; gradients and two states of AdamW of those that are trained.
        self._fixed: float = weights + 3 * trains * size * sum(count for count, trained in elements if trained)

    def visit(self, layout: Layout) -> None:
        """Dry-run a layout, unless it is clear without it that it cannot be the best, or does not fit."""
        found = problem_of(layout, self.request.model)
        if layout.checkpointing != "none" and not self.can_checkpoint:
            found = "the model has no activation checkpointing"
        if found is not None:
            self.excluded.append(Excluded(layout, found))
            return
        needed = self._least_bytes(layout)
        if needed > self.request.available:
            self._too_large(layout, needed, "at least ")
            return
        slow = self._is_slow(layout)
        if slow is not None:
            self.excluded.append(Excluded(layout, slow))
            return
        try:
            choice = self.run(layout)
        except ValueError as error:
            if is_of_every_layout(error):
                raise
            self.excluded.append(Excluded(layout, " ".join(str(error).split())))
            return
        if choice.peak_bytes > self.request.available:
            self._too_large(layout, choice.peak_bytes)
        else:
            self.choices.append(choice)

    def run(self, layout: Layout) -> Choice:
        """Dry-run a layout. The result of one with other data or CFG ranks is used if it is the same."""
        request = self.request
        step = self.runs.step(request, layout)
        times = time_step(step, request.device)
        forwards = 2 if request.task == "sample" and request.model.guided and layout.cfg == 1 else 1
        samples = request.batch_size * (layout.data if request.task == "train" else 1)
        choice = Choice(layout, times, times.seconds * forwards / samples, step.peak, step.flops, step.sent_bytes())
        self._seen[layout] = choice
        return choice

    def _too_large(self, layout: Layout, needed: float, least: str = "") -> None:
        request = self.request
        total = needed / GB + request.reserved_gb
        reason = f"needs {least}{total:.4g} GB of {request.memory:.4g} GB"
        self.excluded.append(Excluded(layout, reason, needed))

    def _least_bytes(self, layout: Layout) -> float:
        """Return a lower bound of the memory.

        Weights, gradients and optimizer states are known. A context of n ranks divides activations by at most n.
        """
        ranks = layout.ranks if self.request.task == "train" else layout.ring * layout.ulysses
        fixed = self._fixed / (ranks if layout.sharded else 1)
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


def _what_is_missing(search: _Search, *, advise: bool) -> str:
    """Return how much memory is missing, and the first of some changes that would fit, from the cheapest on."""
    request = search.request
    found = closest(search.excluded)
    missing = request.missing_gb(found)
    text = f"nothing fits: {described(found.layout)} needs {missing:.3g} GB more than {request.memory:.4g} GB"
    return f"{text}; {_change_that_fits(search, found.layout)}" if advise else text


def _change_that_fits(search: _Search, smallest: Layout) -> str:
    request = search.request
    level: Checkpointing = "full" if request.task == "train" and search.can_checkpoint else "none"
    if request.task == "train" and request.lora is None:
        smaller = _Search(replace(request, lora=LoraSettings(rank=16)), DryRuns())
        layout = replace(smallest, checkpointing=level, sharded=request.ranks > 1)
        if smaller.run(layout).peak_bytes <= request.available:
            return f"lora.rank=16 would fit ({described(layout)})"
    for factor in (2, 4, 8, 16):
        layout = replace(smallest, ring=smallest.ring * factor, sharded=True, checkpointing=level)
        if problem_of(layout, request.model) is None and search.run(layout).peak_bytes <= request.available:
            return f"ranks={layout.ranks} would fit ({described(layout)})"
    return "neither LoRA nor 16 times as many ranks would fit: use a smaller size, or devices with more memory"
