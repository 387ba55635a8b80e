"""The request of a user to the planner, and the result of its search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, get_args

import torch

from lightning_cp.finetune.adapters.lora_settings import LoraSettings
from lightning_cp.pipelines.settings import Placement
from lightning_cp.planning.components import Pipeline
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
        reserved_gb: memory of a rank that is not in the dry run: CUDA's context, NCCL's buffers, and encoders and VAE
            without `pipeline`.
        lora: adapters to train in place of the weights.
        dtype: dtype of the weights.
        autocast: see `StepSettings`.
        batch_size: number of samples in `model.inputs`.
        plan: a plan for the model; None: the registered one.
        fixed: attributes of layouts that are set, for example {"ring": 2}; all others are searched.
        pipeline: encoders and VAE of the model, for sampling; None: not planned.
        stages: which components of a pipeline are on the device: see `parallelize_pipeline`.
        mlp_tiles: see `engine.apply.parallelize`.
        num_inference_steps: steps of a sample; None: the default of its pipeline.
    Raises: ValueError: an invalid value.
    """

    model: PlannedModel
    ranks: int
    device: Device
    task: Task = "train"
    memory_gb: float | None = None
    reserved_gb: float = 2.0
    lora: LoraSettings | None = None
    dtype: torch.dtype = torch.bfloat16
    autocast: torch.dtype | None = None
    batch_size: int = 1
    plan: object = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    pipeline: Pipeline | None = None
    stages: Placement = "together"
    mlp_tiles: int | str | None = None
    num_inference_steps: int | None = None

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
        if self.stages not in (valid := get_args(Placement)):
            raise ValueError(f"stages={self.stages!r} must be one of {', '.join(valid)}")
        if not MLP_TILES.passes(self.mlp_tiles):
            raise ValueError(f"mlp_tiles={self.mlp_tiles!r} must be {MLP_TILES.describe()}")
        if self.mlp_tiles is not None and self.task == "sample":
            raise ValueError(f"mlp_tiles={self.mlp_tiles} is for task=train: leave it out of task=sample")
        if self.num_inference_steps is not None and not Integer(1).passes(self.num_inference_steps):
            raise ValueError(
                f"num_inference_steps={self.num_inference_steps!r} must be null or an integer of at least 1"
            )
        if self.available <= 0:
            raise ValueError(f"reserved_gb={self.reserved_gb} must be less than the memory of a rank, {self.memory} GB")

    @property
    def memory(self) -> float:
        """Memory of a rank, in GB."""
        return self.device.memory_gb if self.memory_gb is None else self.memory_gb

    @property
    def available(self) -> float:
        """Bytes of a rank for the step."""
        return (self.memory - self.reserved_gb) * GB

    @property
    def steps(self) -> int | None:
        """Denoising steps of a sample; None: not known."""
        return self.num_inference_steps or (self.pipeline.steps if self.pipeline else None)

    def forwards(self, layout: Layout) -> int:
        """Return the number of forwards of a rank's step: two with guidance whose branches are not divided."""
        return 2 if self.task == "sample" and self.model.guided and layout.cfg == 1 else 1

    def overrides(self, layout: Layout) -> list[str]:
        """Return the settings of lightning-cp train or lightning-cp sample for a layout."""
        tiles = [] if self.mlp_tiles is None else [f"mlp_tiles={self.mlp_tiles}"]
        return [*overrides_of(layout, self.task, self.batch_size, self.stages), *tiles]

    def missing_gb(self, layout: Excluded) -> float:
        """Return the memory of a rank that a layout lacks, in GB."""
        return (layout.needs_bytes - self.available) / GB


@dataclass(frozen=True)
class SampleStage:
    """A stage of a sample.

    Attributes:
        name: "encode", "denoise" or "decode".
        peak: bytes at the peak of memory, by category, with the weights of all components that are on the device.
        seconds: time of encode, of decode, or of one denoising step.
        problems: components that are not in `seconds`, each with the reason.
    """

    name: str
    peak: dict[str, int]
    seconds: float
    problems: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak of memory."""
        return sum(self.peak.values())


@dataclass(frozen=True)
class Choice:
    """A layout that fits.

    Attributes:
        times: time of a training step, or of a forward in sampling.
        sample_s: training: seconds of a step divided by the samples of all ranks. Sampling: seconds of one step of one
            sample.
        peak: bytes at the peak of memory, by category.
        sent: bytes that a rank sends, by communicator.
        stages: stages of a sample, if a pipeline is planned; `peak` is then the highest of their peaks.
    """

    layout: Layout
    times: Times
    sample_s: float
    peak: dict[str, int]
    flops: int
    sent: dict[str, int]
    stages: tuple[SampleStage, ...] = ()

    @property
    def stage(self) -> str:
        """The stage with the highest peak; "" if only the transformer is planned."""
        return max(self.stages, key=attrgetter("peak_bytes")).name if self.stages else ""

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak of memory."""
        return sum(self.peak.values())


@dataclass(frozen=True)
class Excluded:
    """A layout that is not used.

    Attributes:
        needs_bytes: memory, at least; 0: it was not excluded for its memory.
        stage: name of the stage with the highest peak; "": not known, or only the transformer is planned.
        is_least: it was excluded without a dry run, and may need more.
    """

    layout: Layout
    reason: str
    needs_bytes: float = 0.0
    stage: str = ""
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
