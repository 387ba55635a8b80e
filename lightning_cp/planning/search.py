"""Choose a layout: dry-run those that may fit, compute their times, and take the simplest one of the best."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from lightning_cp.engine.apply import NoPlanError
from lightning_cp.pipelines.placement.sharding import layers_with_weights
from lightning_cp.planning.devices import GB, Device
from lightning_cp.planning.dry_run import ShortModels, UntraceableError, dry_run
from lightning_cp.planning.layouts import (
    LEVELS,
    Task,
    check_fixed,
    described,
    layouts,
    overrides_of,
    problem_of,
    shard_ranks,
    simplicity,
)
from lightning_cp.planning.models import PlannedModel, of_dtype
from lightning_cp.planning.recording import StepSettings
from lightning_cp.planning.step import Layout, Step
from lightning_cp.planning.timeline import Times, time_step
from lightning_cp.rules import MLP_TILES, Either, Integer, Number, OneOf, check_rules, ruled


@dataclass(frozen=True)
class Request:
    """What to plan.

    Attributes:
        model: the model, with the inputs of one rank's step.
        ranks: number of ranks.
        device: the device of each rank.
        task: "train": the highest throughput. "sample": the shortest time of a sample.
        memory_gb: memory of a rank, in 10^9 bytes; None: the device's.
        reserved_gb: memory of a rank that is not in the dry run: CUDA's context, NCCL's buffers.
        others: sampling: GB of the weights of the other components of the pipeline, by name.
        uncounted: a line for each component that is in no number.
        adapt: see `dry_run`.
        dtype: dtype of the weights.
        autocast: see `StepSettings`.
        batch_size: number of samples in `model.inputs`.
        plan: a plan for the model; None: the registered one.
        fixed: attributes of layouts that are set, for example {"ring": 2}; all others are searched.
        mlp_tiles: see `engine.apply.parallelize`.
    Raises: ValueError: an invalid value.
    """

    model: PlannedModel
    ranks: int = field(metadata={"rule": Integer(1)})
    device: Device
    task: Task = ruled("train", OneOf(("train", "sample")))
    memory_gb: float | None = ruled(None, Either(OneOf((None,)), Number(above=0)))
    reserved_gb: float = ruled(2.0, Number(0))
    others: Mapping[str, float] = field(default_factory=dict)
    uncounted: tuple[str, ...] = ()
    adapt: Callable[[nn.Module], object] | None = None
    dtype: torch.dtype = torch.bfloat16
    autocast: torch.dtype | None = None
    batch_size: int = 1
    plan: object = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    mlp_tiles: int | str | None = ruled(None, MLP_TILES)

    def __post_init__(self) -> None:
        check_rules(self)
        if self.adapt is not None and self.task == "sample":
            raise ValueError("lora.rank is for task=train: for sampling, leave it out")
        check_fixed(self.fixed, self.task)
        if self.mlp_tiles is not None and self.task == "sample":
            raise ValueError(f"mlp_tiles={self.mlp_tiles} is for task=train: leave it out of task=sample")
        if self.available <= 0:
            others = "".join(f" + {name} {gb:.3g}" for name, gb in self.others.items())
            needed = f"reserved_gb={self.reserved_gb}{others}"
            raise ValueError(f"{needed} must be less than the memory of a rank, {self.memory} GB")

    @property
    def memory(self) -> float:
        """Memory of a rank, in GB."""
        return self.device.memory_gb if self.memory_gb is None else self.memory_gb

    @property
    def taken_gb(self) -> float:
        """Memory of a rank that the step does not have, in GB."""
        return self.reserved_gb + sum(self.others.values())

    @property
    def available(self) -> float:
        """Bytes of a rank for the step."""
        return (self.memory - self.taken_gb) * GB

    def overrides(self, layout: Layout) -> list[str]:
        """Return the settings of lightning-cp train or lightning-cp sample for a layout."""
        tiles = [] if self.mlp_tiles is None else [f"mlp_tiles={self.mlp_tiles}"]
        return [*overrides_of(layout, self.task, self.batch_size), *tiles]


@dataclass(frozen=True)
class Choice:
    """A layout that fits.

    Attributes:
        step: its dry run.
        times: time of a training step, or of a forward in sampling.
        sample_s: training: seconds of a step divided by the samples of all ranks. Sampling: seconds of one step of one
            sample.
    """

    layout: Layout
    step: Step
    times: Times
    sample_s: float


@dataclass(frozen=True)
class Excluded:
    """A layout that is not used.

    Attributes:
        needs_bytes: memory, at least; 0: it was not excluded for its memory.
        is_least: it was excluded without a dry run, and may need more.
    """

    layout: Layout
    reason: str
    needs_bytes: float = 0.0
    is_least: bool = False


def closest(excluded: Iterable[Excluded]) -> Excluded:
    """Return the layout that was excluded for its memory and needs the least; there must be one."""
    return min((x for x in excluded if x.needs_bytes), key=attrgetter("needs_bytes"))


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        choices: layouts that fit. First those within 15 % of the fastest, the simplest one first; then the others.
        equal: number of those first ones.
        excluded: all other layouts.
        reason: one line: why the first choice, or what is missing.
    """

    request: Request
    choices: tuple[Choice, ...]
    equal: int
    excluded: tuple[Excluded, ...]
    reason: str

    @property
    def best(self) -> Choice | None:
        """The layout to use; None if nothing fits."""
        return self.choices[0] if self.choices else None


_LOG = logging.getLogger(__name__)
OF_EVERY_LAYOUT = (NoPlanError, UntraceableError)  # errors of a dry run that no layout would avoid
CLASS = 1.15  # choices within this factor of the best cannot be ordered by predictions


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
        with torch.device("meta"):
            model: Any = self.request.model.build()
        if self.request.adapt is not None:
            self.request.adapt(model)
        can_checkpoint = getattr(model, "_supports_gradient_checkpointing", True)  # diffusers raises a ValueError
        self.can_checkpoint = hasattr(model, "enable_gradient_checkpointing") and can_checkpoint
        elements = [(x.numel(), x.requires_grad) for x in model.parameters()]
        size = self.request.dtype.itemsize
        trains = self.request.task == "train"
        weights = sum(count for count, _ in elements) * size
        # Weights that every rank holds: sampling shards those of layers only.
        layers = {x for layer in layers_with_weights(model) for x in layer.parameters()}
        self._whole = 0 if trains else weights - size * sum(x.numel() for x in layers)
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
        if choice.step.peak_bytes > self.request.available:
            self._too_large(layout, choice.step.peak_bytes)
        else:
            self.choices.append(choice)

    def run(self, layout: Layout) -> Choice:
        """Dry-run a layout, and compute its time."""
        request = self.request
        step = self._step(layout)
        times = time_step(step, request.device)
        samples = request.batch_size * (layout.data if request.task == "train" else 1)
        forwards = 2 if request.task == "sample" and request.model.guided and layout.cfg == 1 else 1
        self._seen[layout] = Choice(layout, step, times, times.seconds * forwards / samples)
        return self._seen[layout]

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
                adapt=request.adapt,
                plan=request.plan,
                mlp_tiles=request.mlp_tiles,
                short_models=self._short_models,
            )
        return replace(self._steps[traced], layout=layout)

    def what_is_missing(self) -> str:
        """Return how much memory the layout lacks that needs the least, and what usually helps."""
        request, found = self.request, closest(self.excluded)
        least = "at least " if found.is_least else ""
        missing = f"{least}{(found.needs_bytes - request.available) / GB:.3g} GB more than {request.memory:.4g} GB"
        trains, fixed = request.task == "train", request.fixed
        advice = {
            "strategy=cp_fsdp": trains and fixed.get("sharded") is False,
            "activation_checkpointing=full": trains and fixed.get("checkpointing") in ("none", "selective"),
            "lora.rank=16": trains and request.adapt is None,
            "mlp_tiles=auto": trains and request.mlp_tiles is None,
            "components=false with stages=offload": bool(request.others),
            "a smaller batch_size": trains and request.batch_size > 1,
        }
        tried = "".join(f"{name}, " for name, helps in advice.items() if helps)
        return f"nothing fits: {described(found.layout)} needs {missing}. Try {tried}a smaller size, or more ranks"

    def _too_large(self, layout: Layout, needed: float, *, is_least: bool = False) -> None:
        total, least = needed / GB + self.request.taken_gb, "at least " if is_least else ""
        reason = f"needs {least}{total:.4g} GB of {self.request.memory:.4g} GB"
        self.excluded.append(Excluded(layout, reason, needed, is_least))

    def least_bytes(self, layout: Layout) -> float:
        """Return a lower bound of the memory.

        Weights, gradients and optimizer states are known. A context of n ranks divides activations by at most n.
        """
        fixed = self._whole + (self._fixed - self._whole) / shard_ranks(layout, self.request.task)
        one = replace(layout, data=layout.data * layout.ring * layout.ulysses, ring=1, ulysses=1)
        seen = self._seen.get(one)
        if seen is None or one == layout:
            return fixed
        activations = seen.step.peak["activations"] / (layout.ring * layout.ulysses)
        return max(fixed, seen.step.peak_bytes - seen.step.peak["activations"] + activations)

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
    return divides and (a.ring, a.ulysses) != (b.ring, b.ulysses) and a.cfg == b.cfg


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
    used = best.step.peak_bytes / GB + request.taken_gb
    return (
        f"{described(best.layout)}: {others}, bound by {bound} ({share:.0%} of the time), "
        f"{used:.1f} of {request.memory:g} GB"
    )
