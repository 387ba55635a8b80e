"""The features of a parallel pipeline: what `parallelize_pipeline` installs, in this order, and can undo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from lightning_cp.config import ContextParallelConfig
from lightning_cp.engine.apply import Installed, parallelize, remove_context_parallel
from lightning_cp.engine.meta import load_deferred
from lightning_cp.pipelines.adapters import adapt_stages, allow_hotswap
from lightning_cp.pipelines.calls import hide_progress
from lightning_cp.pipelines.components import experts_of
from lightning_cp.pipelines.degrees import declared_degrees
from lightning_cp.pipelines.guidance.controlnets import after_vote, groups_of_all
from lightning_cp.pipelines.guidance.perturbing import check_guiders
from lightning_cp.pipelines.pipefusion.patch_setup import make_patch_calls
from lightning_cp.pipelines.placement.component_stages import follow_stages, make_stages
from lightning_cp.pipelines.placement.sharding import (
    check_placement,
    is_vae,
    layers_to_shard,
    rank_device,
    shard_layers,
)
from lightning_cp.pipelines.settings import PipelineSettings
from lightning_cp.pipelines.stall_watch import share_watch
from lightning_cp.pipelines.state import ParallelPipeline, copy_refusals
from lightning_cp.pipelines.wrappers import device_properties, over_branches, synchronized, vote_before
from lightning_cp.undoable import Undo, intercept_calls
from lightning_cp.vae import parallelize_vae


@dataclass(eq=False)
class Setup:
    """A pipeline that is being made parallel.

    Attributes:
        components, transformers, controlnets: all components; those that denoise; ControlNets with a plan; by name.
        state: the state of the pipeline, which features complete.
        layers: layers to shard, by component name.
    """

    pipeline: Any
    components: dict[str, Any]
    transformers: dict[str, nn.Module]
    controlnets: dict[str, nn.Module]
    state: ParallelPipeline
    layers: dict[str, list[nn.Module]] = field(default_factory=dict)

    @property
    def settings(self) -> PipelineSettings:
        """The settings of `parallelize_pipeline`."""
        return self.state.settings

    def prepare(self) -> None:
        """Find out where weights are to be, and build the groups of all degrees. Ranks: the whole world.

        Raises: ValueError, TypeError: settings that do not fit the pipeline.
        """
        settings, ranks, found = self.settings, self.state.ranks, self.transformers
        self.layers = layers_to_shard(self.components, settings.shard, found, ranks)
        self.state.stages = make_stages(self.pipeline, settings.stages, self.components, found, rank_device(ranks))
        self.check()
        sharded = next((name for name in self.layers if name in found), None)
        self.state.degrees = declared_degrees(settings.degrees or {}, settings.config, ranks, sharded=sharded)

    def check(self) -> None:
        """Check, before each call too, that weights and guiders are compatible. Raises: PlanError: they are not."""
        stages = self.settings.stages
        check_placement(self.pipeline, self.components, self.transformers, shard=self.layers, stages=stages)
        check_guiders(self.pipeline, self.state.ranks)

    def divide_weights(self) -> None:
        """Shard weights, and free those of other stages of blocks. This cannot be undone."""
        state = self.state
        if self.layers or self.settings.num_stages > 1:
            state.equal_components.compare_weights(self.components)  # while they are whole
        shard_layers(self.layers, self.components, self.transformers, state.ranks)
        for calls in state.patch_calls.values():
            calls.release()
        for module in self.transformers.values():
            load_deferred(module)

    def parallelize(self, module: nn.Module, config: ContextParallelConfig, **others: Any) -> Installed:
        """Install the plan of a module."""
        kernel, check_peers = self.settings.kernel, self.settings.check_peers
        return parallelize(module, config, kernel=kernel, check_peers=check_peers, **others)


def _stall_watch(setup: Setup) -> Iterable[Undo]:
    return share_watch(setup.settings.stall_s, setup.state.ranks)


def _transformers(setup: Setup) -> Iterator[Undo]:
    for name, module in setup.transformers.items():
        setup.state.transformers[name] = setup.parallelize(module, setup.settings.config, shares=setup.settings.shares)
        yield partial(remove_context_parallel, module)


def _pipefusion(setup: Setup) -> Iterator[Undo]:
    """Compute transformers in patches and stages of blocks."""
    state, pipeline, settings = setup.state, setup.pipeline, setup.settings
    state.patch_calls = make_patch_calls(
        state.transformers,
        state.ranks,
        state.votes,
        pipe=settings.pipe,
        patches=settings.patches,
        warmup=settings.warmup,
        clock=state.clock,
        experts=experts_of(pipeline, setup.transformers),
        is_guided=lambda: bool(getattr(pipeline, "do_classifier_free_guidance", False)),
        on_step=state.calls.count_step,
    )
    for calls in state.patch_calls.values():
        yield from calls.install()


def _controlnets(setup: Setup) -> Iterator[Undo]:
    """Make all ranks that share a sample divide the tokens of ControlNets, and vote before each of their calls."""
    state = setup.state
    config, groups = groups_of_all(setup.settings.config, state.ranks)
    for name, module in setup.controlnets.items():
        installed = state.controlnets[name] = setup.parallelize(module, config, groups=groups)
        yield partial(remove_context_parallel, module)
        yield intercept_calls(module, after_vote(state.calls, state.votes, installed))


def _guidance(setup: Setup) -> Iterator[Undo]:
    """Distribute the calls of transformers over the branches of guidance."""
    state = setup.state
    for name, installed in state.transformers.items():
        around = over_branches(state.calls, state.votes, installed, state.patch_calls.get(name))
        yield intercept_calls(setup.transformers[name], around)


def _adapters(setup: Setup) -> Iterator[Undo]:
    """Let LoRAs be loaded and swapped."""
    for module in (*setup.transformers.values(), *setup.controlnets.values()):
        if hasattr(module, "load_lora_adapter"):
            yield allow_hotswap(module)
    for name in setup.state.patch_calls if setup.settings.num_stages > 1 else ():
        yield from adapt_stages(setup.pipeline, setup.transformers[name], setup.settings.pipe)


def _decoders(setup: Setup) -> Iterator[Undo]:
    """Encode and decode on all ranks that share a sample; with vae="auto", if the autoencoder's class supports it."""
    state, setting = setup.state, setup.settings.vae
    for name, module in setup.components.items():
        if is_vae(module) and setting and state.ranks.sample.context is not None:
            try:
                undo = parallelize_vae(module, state.ranks.sample)
            except ValueError:
                if setting is True:
                    raise
                continue
            state.decoders.append(name)
            yield undo
    sharded_encoders = [name for name in setup.layers if name not in setup.transformers]
    yield from vote_before(state.votes, setup.components, state.decoders, sharded_encoders)


def _component_stages(setup: Setup) -> Iterable[Undo]:
    """Move components to the device in their stage of a call."""
    return () if setup.state.stages is None else follow_stages(setup.state.stages)


def _calls(setup: Setup) -> Iterator[Undo]:
    """Make the ranks that share a sample take part in the pipeline's calls."""
    pipeline, state, ranks = setup.pipeline, setup.state, setup.state.ranks
    attributes = {**device_properties(state.stages), **copy_refusals(state.name)}
    yield intercept_calls(pipeline, synchronized(pipeline, state, setup.check), **attributes)
    if (ranks.data_rank, ranks.sample.context_rank) != (0, 0):
        yield hide_progress(pipeline)


FEATURES: tuple[Callable[[Setup], Iterable[Undo]], ...] = (
    _stall_watch,
    _transformers,
    _pipefusion,
    _controlnets,
    _guidance,
    _adapters,
    _decoders,
    _component_stages,  # after all wrappers of components: a rank changes the stage also for another rank's call
    _calls,
)
