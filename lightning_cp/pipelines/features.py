"""The features of a parallel pipeline: what `parallelize_pipeline` installs, in this order, and can undo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_cp.compat.torch_names import default_timeout
from lightning_cp.config import ContextParallelConfig
from lightning_cp.engine.apply import Installed, parallelize, remove_context_parallel
from lightning_cp.engine.graphs import GraphedForward, recorder
from lightning_cp.engine.meta import load_deferred
from lightning_cp.launch.stall import StallWatch, current_watch, stop_watch, watch_stalls
from lightning_cp.pipelines.adapters import adapt_stages, allow_hotswap
from lightning_cp.pipelines.calls import hide_progress
from lightning_cp.pipelines.components import compile_in_place, experts_of, refuse_cuda_graphs
from lightning_cp.pipelines.guidance.controlnets import after_vote, groups_of_all
from lightning_cp.pipelines.pipefusion.runner import make_patch_runners
from lightning_cp.pipelines.placement.component_stages import make_component_stages, watch_component_stages
from lightning_cp.pipelines.placement.sharding import is_vae, layers_to_shard, sampling_device, shard_layers
from lightning_cp.pipelines.state import ParallelPipeline, copy_refusals
from lightning_cp.pipelines.wrappers import device_properties, over_branches, synchronized, vote_before
from lightning_cp.undoable import Undo, intercept_calls
from lightning_cp.vae import parallelize_vae


def _weights(state: ParallelPipeline) -> Iterable[Undo]:
    """Find out where weights are to be. Raises: ValueError, TypeError: settings that do not fit the pipeline."""
    settings, ranks, transformers = state.settings, state.ranks, state.modules
    state.layers = layers_to_shard(state.components, settings.shard, transformers, ranks)
    state.component_stages = make_component_stages(
        state.pipeline, settings.stages, state.components, transformers, sampling_device(ranks)
    )
    state.check()
    return ()


def _parallelize(state: ParallelPipeline, module: nn.Module, config: ContextParallelConfig, **others: Any) -> Installed:
    kernel, check_peers = state.settings.kernel, state.settings.check_peers
    return parallelize(module, config, kernel=kernel, check_peers=check_peers, **others)


def _stall_watch(state: ParallelPipeline) -> Iterator[Undo]:
    """Watch the calls for collectives that stall. A watch that runs already is used as it is; its `stall_s` holds."""
    stall_s = state.settings.stall_s
    if stall_s is None or state.ranks.sample.context_size == 1 or dist.get_backend() == "fake":
        return
    watch = current_watch()
    if watch is not None:
        watch.users += 1
    else:
        watch = watch_stalls(after_s=stall_s, timeout_s=default_timeout().total_seconds())
    if watch is not None:
        yield partial(_leave, watch)


def _leave(watch: StallWatch) -> None:
    watch.users -= 1
    if watch.users == 0 and watch is current_watch():
        stop_watch()


def _compiled(state: ParallelPipeline) -> Iterator[Undo]:
    """Let transformers that are compiled as a whole stay compiled, below the wrappers of their calls."""
    yield from compile_in_place(state.pipeline)
    for module in state.modules.values():
        refuse_cuda_graphs(module.__dict__.get("_compiled_call_impl"))


def _transformers(state: ParallelPipeline) -> Iterator[Undo]:
    for name, module in state.modules.items():
        state.transformers[name] = _parallelize(state, module, state.settings.config, shares=state.settings.shares)
        yield partial(remove_context_parallel, module)


def _pipefusion(state: ParallelPipeline) -> Iterator[Undo]:
    pipeline, settings = state.pipeline, state.settings
    state.patch_runners = make_patch_runners(
        state.transformers,
        state.ranks,
        state.votes,
        pipe=settings.pipe,
        patches=settings.patches,
        warmup=settings.warmup,
        clock=state.clock,
        experts=experts_of(pipeline, state.modules),
        on_step=state.branch_runner.count_step,
    )
    for runner in state.patch_runners.values():
        yield from runner.install()


def _graphs(state: ParallelPipeline) -> Iterator[Undo]:
    """Run forwards in CUDA graphs. All graphs of the pipeline share one memory pool."""
    setting, recorder_of = state.settings.graphs, cache(recorder.recorder_for)
    device = sampling_device(state.ranks)
    has_recorder = bool(setting) and recorder_of(device) is not None
    if setting is True and not has_recorder:
        raise ValueError(f"graphs=True needs a GPU, but this rank samples on {device}: use graphs='auto' or False")
    if not has_recorder or state.patch_runners:
        return
    for name, installed in state.installed.items():
        graphed = state.graphs[name] = GraphedForward(installed, setting, recorder_of)
        yield graphed.drop
        yield intercept_calls(installed.module, graphed.run, check_compiled=refuse_cuda_graphs)


def _controlnets(state: ParallelPipeline) -> Iterator[Undo]:
    """Make all ranks that share a sample divide the tokens of ControlNets."""
    config, groups = groups_of_all(state.settings.config, state.ranks)
    for name, module in state.controlnet_modules.items():
        state.controlnets[name] = _parallelize(state, module, config, groups=groups)
        yield partial(remove_context_parallel, module)


def _guidance(state: ParallelPipeline) -> Iterator[Undo]:
    """Distribute the calls of transformers over the branches of guidance, and vote before those of ControlNets."""
    for installed in state.controlnets.values():
        yield intercept_calls(installed.module, after_vote(state.branch_runner, state.votes, installed))
    for name, installed in state.transformers.items():
        around = over_branches(state.branch_runner, state.votes, installed, state.patch_runners.get(name))
        yield intercept_calls(state.modules[name], around, check_compiled=refuse_cuda_graphs)


def _adapters(state: ParallelPipeline) -> Iterator[Undo]:
    for module in (*state.modules.values(), *state.controlnet_modules.values()):
        if hasattr(module, "load_lora_adapter"):
            yield allow_hotswap(module)
    for name in state.patch_runners if state.settings.num_stages > 1 else ():
        yield from adapt_stages(state.pipeline, state.modules[name], state.settings.pipe)


def _decoders(state: ParallelPipeline) -> Iterator[Undo]:
    """Encode and decode on all ranks that share a sample; with vae="auto", if the autoencoder's class supports it."""
    setting = state.settings.vae
    for name, module in state.components.items():
        if is_vae(module) and setting and state.ranks.sample.context is not None:
            try:
                undo = parallelize_vae(module, state.ranks.sample)
            except ValueError:
                if setting is True:
                    raise
                continue
            state.decoders.append(name)
            yield undo
    sharded_encoders = [name for name in state.layers if name not in state.modules]
    yield from vote_before(state.votes, state.components, state.decoders, sharded_encoders)


def _component_stages(state: ParallelPipeline) -> Iterable[Undo]:
    return () if state.component_stages is None else watch_component_stages(state.component_stages)


def _calls(state: ParallelPipeline) -> Iterator[Undo]:
    """Make the ranks that share a sample take part in the pipeline's calls."""
    pipeline, ranks = state.pipeline, state.ranks
    attributes = {**device_properties(state.component_stages), **copy_refusals(state.name)}
    yield intercept_calls(pipeline, synchronized(state), **attributes)
    if (ranks.data_rank, ranks.sample.context_rank) != (0, 0):
        yield hide_progress(pipeline)


FEATURES: tuple[Callable[[ParallelPipeline], Iterable[Undo]], ...] = (
    _compiled,
    _weights,
    _stall_watch,
    _transformers,
    _pipefusion,
    _controlnets,
    _graphs,
    _guidance,
    _adapters,
    _decoders,
    _component_stages,  # after all wrappers of components: a rank changes the stage also for another rank's call
    _calls,
)


def divide_weights(state: ParallelPipeline) -> None:
    """Shard weights, and free those of other stages of blocks. This cannot be undone."""
    if state.layers or state.settings.num_stages > 1:
        state.equal_components.compare_weights(state.components)  # while they are whole
    shard_layers(state.layers, state.components, state.modules, state.ranks)
    for runner in state.patch_runners.values():
        runner.release()
    for module in state.modules.values():
        load_deferred(module)
