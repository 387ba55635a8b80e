"""Make a pipeline context-parallel in place (`parallelize_pipeline`), and undo it (`unparallelize_pipeline`)."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist

from lightning_cp.compat.check import check_private_uses
from lightning_cp.config import ContextParallelConfig, check_degree, context_config
from lightning_cp.engine.apply import Installed, parallelize, remove_context_parallel
from lightning_cp.errors import PlanError
from lightning_cp.mesh import Branches, branches_for
from lightning_cp.patching import Around, Undo, intercept_calls, intercept_method, undo_all
from lightning_cp.pipelines.agreement import sync_rng_and_check_inputs
from lightning_cp.pipelines.branches import BranchCalls, guidance_may_start_late
from lightning_cp.pipelines.calls import arguments_by_name, only_one_shows_progress
from lightning_cp.pipelines.components import components_of, share_decoders, transformers_of
from lightning_cp.pipelines.lazy_tensor import resolve_all
from lightning_cp.pipelines.perturbing import check_guiders, refuse_processor_swaps
from lightning_cp.pipelines.placement import (
    check_placement,
    layers_to_shard,
    mark_unusable,
    rank_device,
    shard_layers,
)
from lightning_cp.pipelines.stages import Setting, Stages, follow_stages, make_stages
from lightning_cp.shares import show_shares

_INSTALLED = "_lightning_cp"
_log = logging.getLogger("lightning_cp")


@dataclass(eq=False)
class ParallelPipeline:
    """State of a parallel pipeline.

    Attributes:
        ranks: groups of ranks that share a sample, a CFG branch or tokens.
        transformers: installed transformers, by component name.
        decoders: names of the autoencoders that encode and decode in parallel.
        calls: distributes transformer calls over CFG branches; counts those of the last pipeline call.
        shard: names of the components with weights sharded over ranks (FSDP2).
        stages: device placement by stage; None for the setting "together".
        undo: functions that restore the pipeline, to be called last to first.
    """

    ranks: Branches
    transformers: dict[str, Installed]
    decoders: tuple[str, ...]
    calls: BranchCalls
    shard: tuple[str, ...] = ()
    stages: Stages | None = None
    undo: list[Undo] = field(default_factory=list)


def parallelize_pipeline(
    pipe: Any,
    parallel_config: object,
    *,
    cfg: int = 1,
    vae: bool | Literal["auto"] = "auto",
    shard: Sequence[str] = (),
    stages: Setting = "together",
    kernel: str = "auto",
    check_peers: str = "sampled",
    shares: Sequence[float] | None = None,
) -> None:
    """Make a diffusers pipeline context-parallel, in place. Then call it on every rank as in one process.

    **All ranks that share a sample draw the same noise.** At each call, the given `torch.Generator`s and torch's
    default random states (used if no generator is given) are set to those of the first of these ranks. Other arguments
    must be equal, and are compared. Every rank returns the whole result and runs the callbacks.

    World size = data x cfg x ring x ulysses. Data groups may get different prompts (`sample_prompts`).

    Args:
        pipe: a `DiffusionPipeline` or `ModularPipeline`. Every component with a plan is made parallel (both experts of
            Wan).
        parallel_config: `ContextParallelConfig` or `ParallelConfig`, lightning_cp's or diffusers'.
        cfg: CFG degree: number of groups that compute branches of guidance in parallel. 2 for classifier-free guidance.
        vae: True: encode and decode in parallel. "auto": if the autoencoder's class supports it. False: do not.
        shard: names of components to shard over ranks layer by layer (FSDP2), for pipelines that do not fit on one
            device. They are moved to the rank's device layer by layer. This cannot be undone.
        stages: "together": leave components where they are. "offload": keep only the components of the current stage
            (encode, denoise, decode) on the rank's device, the others in host memory. "release": move components to the
            device when needed and free their weights after their stage, so the pipeline can be called only once. With
            both, components may be in host memory now.
        kernel: attention kernel by name; "auto" chooses by device, dtype and mask.
        check_peers: "first", "sampled", "always" or "off": how often the arguments of transformers are compared between
            context peers, with the same values as for the strategies.
        shares: for unequal devices, a positive weight for each rank of a context group, in rank order: [2, 1] gives the
            first rank two thirds of the tokens, of the heads with Ulysses, and of the autoencoder's rows or tiles. All
            context groups use the same. None: equal.
    Ranks: the whole world.
    Raises: ValueError, TypeError: invalid settings, or components that cannot be parallel. The pipeline is unchanged,
        unless layers were already sharded: it then raises at every call.
    """
    check_private_uses("pipeline")
    components = components_of(pipe)
    if parallel_pipeline(pipe) is not None:
        raise PlanError(f"{type(pipe).__name__} is already context-parallel: call unparallelize_pipeline first")
    _check_started()
    config, cfg = context_config(parallel_config), check_degree("cfg", cfg, default=1)
    found = transformers_of(pipe, components)
    refuse_processor_swaps(pipe)
    ranks = branches_for(config, cfg, shares)
    layers = layers_to_shard(components, shard, found, ranks)
    staged = make_stages(pipe, stages, components, found, rank_device(ranks))

    def check() -> None:
        check_placement(pipe, components, found, shard=layers, stages=stages)
        check_guiders(pipe, ranks)

    check()
    undo: list[Undo] = []
    try:
        installed = {}
        for name, module in found.items():
            installed[name] = parallelize(module, config, kernel=kernel, check_peers=check_peers, shares=shares)
            undo.append(lambda module=module: remove_context_parallel(module))  # type: ignore[misc]
        calls = BranchCalls(type(pipe).__name__, ranks)
        undo += [intercept_calls(found[name], _over_branches(calls, one)) for name, one in installed.items()]
        scheduler = components.get("scheduler")
        if ranks.cfg > 1 and hasattr(scheduler, "step"):  # callbacks after the step get real tensors
            undo.append(intercept_method(scheduler, "step", _with_resolved_tensors))
        decoders = share_decoders(components, vae, ranks, undo)
        if staged is not None:
            follow_stages(staged, undo)
        undo.append(intercept_calls(pipe, _synchronized(pipe, calls, staged, check), **_device_properties(staged)))
        undo.append(only_one_shows_progress(pipe, shows=(ranks.data_rank, ranks.sample.context_rank) == (0, 0)))
        shard_layers(layers, components, found, ranks)  # last: cannot be undone
    except BaseException as error:
        undo_all(undo)
        mark_unusable(pipe, layers, error)
        raise
    if staged is not None:
        staged.offload_all()
    pipe.__dict__[_INSTALLED] = ParallelPipeline(ranks, installed, decoders, calls, tuple(layers), staged, undo)
    _describe(pipe, config)


def unparallelize_pipeline(pipe: Any) -> None:
    """Undo `parallelize_pipeline`. Raises: ValueError: the pipeline is not parallel, or its weights are sharded."""
    installed = parallel_pipeline(pipe)
    if installed is None:
        raise PlanError(f"{type(pipe).__name__} is not context-parallel: nothing to undo")
    if installed.shard and installed.ranks.sample.context_size > 1:
        raise PlanError(
            f"shard={list(installed.shard)}: sharded weights cannot be gathered in place: "
            f"load the {type(pipe).__name__} again"
        )
    undo_all(installed.undo)
    del pipe.__dict__[_INSTALLED]


def parallel_pipeline(pipe: Any) -> ParallelPipeline | None:
    """Return the state that `parallelize_pipeline` stored on a pipeline; None if it is not parallel."""
    found: ParallelPipeline | None = getattr(pipe, "__dict__", {}).get(_INSTALLED)
    return found


def _over_branches(calls: BranchCalls, installed: Installed) -> Around:
    """Wrap a transformer's calls. Outside this pipeline's calls the RNG is not synchronised: inputs are compared."""

    def around(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if calls.is_active and calls.branches.cfg > 1:
            return calls.call(installed.module, call, args, kwargs)
        if not calls.is_active:
            installed.session.peers.compare_next_in_full()
        return call(*args, **kwargs)

    return around


def _with_resolved_tensors(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call(*resolve_all(args), **resolve_all(kwargs))


def _synchronized(pipe: Any, calls: BranchCalls, stages: Stages | None, check: Callable[[], None]) -> Around:
    """Wrap the pipeline's calls: check components, sync the RNG, compare inputs, run the stages, resolve results."""
    signature = inspect.signature(type(pipe).__call__)

    def around(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = arguments_by_name(signature, args, kwargs)
        check()
        sync_rng_and_check_inputs(given, calls.branches.sample)
        calls.begin(may_start_late=guidance_may_start_late(pipe, given))
        try:
            with nullcontext() if stages is None else stages.call(given):
                return resolve_all(call(*args, **kwargs))
        finally:
            calls.end()

    return around


def _device_properties(stages: Stages | None) -> dict[str, Any]:
    """Return properties that fix the pipeline's device, which diffusers otherwise reads from offloaded components."""
    if stages is None:
        return {}
    device = property(lambda pipe: stages.device)
    return {"device": device, "_execution_device": device}


def _check_started() -> None:
    world = os.environ.get("WORLD_SIZE", "1")
    if world not in ("", "1") and not dist.is_initialized():
        raise ValueError(
            f"WORLD_SIZE={world}, but there is no process group, so each rank would sample "
            "everything alone: call torch.distributed.init_process_group first"
        )


def _describe(pipe: Any, config: ContextParallelConfig) -> None:
    installed = parallel_pipeline(pipe)
    assert installed is not None, "it has just been made parallel"
    ranks = installed.ranks
    if (ranks.data_rank, ranks.sample.context_rank) == (0, 0):
        degrees = f"data {ranks.data_size} × cfg {ranks.cfg} × ring {config.ring} × ulysses {config.ulysses}"
        degrees += show_shares(ranks.context.shares)
        names = ", ".join([*installed.transformers, *installed.decoders])
        total = ranks.data_size * ranks.sample.context_size
        _log.info("%s: %d ranks = %s; parallel: %s", type(pipe).__name__, total, degrees, names)
