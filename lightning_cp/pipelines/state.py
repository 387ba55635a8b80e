"""State of a parallel pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import nn

from lightning_cp.engine.apply import Installed
from lightning_cp.engine.graphs.forward import GraphedForward
from lightning_cp.errors import PlanError
from lightning_cp.mesh.sample_groups import SampleGroups
from lightning_cp.pipelines.components import check_guiders
from lightning_cp.pipelines.equal_components import EqualComponents
from lightning_cp.pipelines.error_votes import Votes
from lightning_cp.pipelines.guidance.branches import BranchRunner
from lightning_cp.pipelines.guidance.step_clock import StepClock
from lightning_cp.pipelines.pipefusion.runner import PatchRunner
from lightning_cp.pipelines.placement.component_stages import ComponentStages
from lightning_cp.pipelines.placement.sharding import check_placement
from lightning_cp.pipelines.settings import PipelineSettings
from lightning_cp.undoable import Feature

INSTALLED = "_lightning_cp"


@dataclass(eq=False)
class ParallelPipeline:
    """State of a parallel pipeline.

    Attributes:
        name: class name of the pipeline.
        components, modules, controlnet_modules: all components; those that denoise; ControlNets with a plan; by name.
        ranks: groups of ranks that share a sample, a CFG branch or tokens.
        transformers, controlnets: installed modules, by component name.
        decoders: names of the autoencoders that encode and decode in parallel.
        graphs: run the forwards of a transformer or ControlNet in CUDA graphs, by component name.
        patch_runners: the transformers that are computed in patches or stages of blocks, by component name.
        layers: the layers to shard over ranks (FSDP2), by component name.
        component_stages: device placement by component stage; None for the setting "together".
        features: what was installed, in order.
        votes: end a call on all ranks that share a sample if one of them fails.
        branch_runner: distributes transformer calls over CFG branches; counts those of the last pipeline call.
        clock: counts transformer calls of a step.
        equal_components: compares components between the ranks that share a sample.
    """

    pipeline: Any
    settings: PipelineSettings
    ranks: SampleGroups
    components: dict[str, Any]
    modules: dict[str, nn.Module]
    controlnet_modules: dict[str, nn.Module]
    transformers: dict[str, Installed] = field(default_factory=dict)
    controlnets: dict[str, Installed] = field(default_factory=dict)
    decoders: list[str] = field(default_factory=list)
    graphs: dict[str, GraphedForward] = field(default_factory=dict)
    patch_runners: dict[str, PatchRunner] = field(default_factory=dict)
    layers: dict[str, list[nn.Module]] = field(default_factory=dict)
    component_stages: ComponentStages | None = None
    features: list[Feature] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings, control, self.name = self.settings, self.ranks.control, type(self.pipeline).__name__
        self.votes, self.branch_runner = Votes(self.name, control), BranchRunner(self.name, self.ranks)
        self.branch_runner.pending.before_flush = self.votes.check
        self.clock = StepClock(must_be_equal=settings.patches > 1)
        is_on, in_stages = settings.check_peers != "off", settings.num_stages > 1
        self.equal_components = EqualComponents(control, is_on=is_on, in_stages=in_stages)

    @property
    def installed(self) -> dict[str, Installed]:
        """All installed transformers and ControlNets, by component name."""
        return {**self.transformers, **self.controlnets}

    def check(self) -> None:
        """Check, before each call too, that weights and guiders are compatible. Raises: PlanError: they are not."""
        stages = self.settings.stages
        check_placement(self.pipeline, self.components, self.modules, shard=self.layers, stages=stages)
        check_guiders(self.pipeline, self.ranks)

    def undo(self) -> None:
        """Undo all features, last to first."""
        for feature in reversed(self.features):
            feature.undo()


def parallel_pipeline(pipe: Any) -> ParallelPipeline | None:
    """Return the state that `parallelize_pipeline` stored on a pipeline; None if it is not parallel."""
    state: ParallelPipeline | None = getattr(pipe, "__dict__", {}).get(INSTALLED)
    return state


def copy_refusals(name: str) -> dict[str, Any]:
    """Return methods that refuse copies and pickles of a parallel pipeline. Args: name: its class, for the error."""
    reason = f"a parallel {name} cannot be copied or pickled, because its ranks share process groups: call "
    way_out = "unparallelize_pipeline first, and parallelize_pipeline on each copy"

    def refuse(pipe: object, _: object) -> NoReturn:
        raise PlanError(f"{reason}{way_out}")

    def shallow(pipe: Any) -> Any:
        copied = object.__new__(type(pipe))
        copied.__dict__.update(pipe.__dict__)
        return copied

    return {"__deepcopy__": refuse, "__reduce_ex__": refuse, "__copy__": shallow}


def parallel_state(pipe: Any) -> ParallelPipeline:
    """Return the state of a parallel pipeline. Raises: PlanError: it is not parallel."""
    state = parallel_pipeline(pipe)
    if state is None:
        raise PlanError(f"{type(pipe).__name__} is not parallel: call parallelize_pipeline first")
    return state
