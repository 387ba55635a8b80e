"""The request of a user to the planner, and the result of its search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from lightning_cp.finetune.adapters.lora_settings import LoraSettings
from lightning_cp.planning.devices import GB, Device
from lightning_cp.planning.layouts import Task, check_fixed, overrides_of
from lightning_cp.planning.models import PlannedModel
from lightning_cp.planning.step import Layout
from lightning_cp.planning.timeline import Times
from lightning_cp.rules import MLP_TILES, Integer, Number


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
        lora: adapters to train in place of the weights.
        dtype: dtype of the weights.
        autocast: see `StepSettings`.
        batch_size: number of samples in `model.inputs`.
        plan: a plan for the model; None: the registered one.
        fixed: attributes of layouts that are set, for example {"ring": 2}; all others are searched.
        mlp_tiles: see `engine.apply.parallelize`.
    Raises: ValueError: an invalid value.
    """

    model: PlannedModel
    ranks: int
    device: Device
    task: Task = "train"
    memory_gb: float | None = None
    reserved_gb: float = 2.0
    others: Mapping[str, float] = field(default_factory=dict)
    uncounted: tuple[str, ...] = ()
    lora: LoraSettings | None = None
    dtype: torch.dtype = torch.bfloat16
    autocast: torch.dtype | None = None
    batch_size: int = 1
    plan: object = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    mlp_tiles: int | str | None = None

    def __post_init__(self) -> None:
        if not Integer(1).passes(self.ranks):
            raise ValueError(f"ranks={self.ranks!r} must be an integer of at least 1")
        if self.task not in ("train", "sample"):
            raise ValueError(f"task={self.task!r} must be train or sample")
        if self.memory_gb is not None and not Number(above=0).passes(self.memory_gb):
            raise ValueError(f"memory_gb={self.memory_gb!r} must be a number above 0")
        if not Number(0).passes(self.reserved_gb):
            raise ValueError(f"reserved_gb={self.reserved_gb!r} must be a number of at least 0")
        if self.lora is not None and self.task == "sample":
            raise ValueError("lora.rank is for task=train: for sampling, leave it out")
        check_fixed(self.fixed, self.task)
        if not MLP_TILES.passes(self.mlp_tiles):
            raise ValueError(f"mlp_tiles={self.mlp_tiles!r} must be {MLP_TILES.describe()}")
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

    def forwards(self, layout: Layout) -> int:
        """Return the number of forwards of a rank's step: two with guidance whose branches are not divided."""
        return 2 if self.task == "sample" and self.model.guided and layout.cfg == 1 else 1

    def overrides(self, layout: Layout) -> list[str]:
        """Return the settings of lightning-cp train or lightning-cp sample for a layout."""
        tiles = [] if self.mlp_tiles is None else [f"mlp_tiles={self.mlp_tiles}"]
        return [*overrides_of(layout, self.task, self.batch_size), *tiles]

    def missing_gb(self, layout: Excluded) -> float:
        """Return the memory of a rank that a layout lacks, in GB."""
        return (layout.needs_bytes - self.available) / GB


@dataclass(frozen=True)
class Choice:
    """A layout that fits.

    Attributes:
        times: time of a training step, or of a forward in sampling.
        sample_s: training: seconds of a step divided by the samples of all ranks. Sampling: seconds of one step of one
            sample.
        peak: bytes at the peak of memory, by category.
        sent: bytes that a rank sends, by communicator.
    """

    layout: Layout
    times: Times
    sample_s: float
    peak: dict[str, int]
    flops: int
    sent: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak of memory."""
        return sum(self.peak.values())


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
