"""`parallelize_pipeline` and `unparallelize_pipeline`: a pipeline in place, reversibly."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist

from lightning_cp.config import ContextParallelConfig, check_degree, context_config
from lightning_cp.engine.apply import Installed, parallelize, remove_context_parallel
from lightning_cp.errors import PlanError
from lightning_cp.mesh import Branches, branches_for
from lightning_cp.pipelines.agreement import sync_rng_and_check_inputs
from lightning_cp.pipelines.branches import BranchCalls, guidance_may_wait
from lightning_cp.pipelines.components import components_of, share_decoders, transformers_of
from lightning_cp.pipelines.lazy_tensor import resolve_all
from lightning_cp.pipelines.patching import (
    Around,
    Undo,
    arguments_by_name,
    intercept_calls,
    intercept_method,
    only_one_shows_progress,
    undo_all,
)
from lightning_cp.pipelines.perturbing import check_guiders, refuse_processor_swaps
from lightning_cp.pipelines.placement import (
    check_placement,
    layers_to_shard,
    mark_unusable,
    rank_device,
    shard_layers,
)
from lightning_cp.pipelines.stages import Setting, Stages, follow_stages, make_stages

_INSTALLED = "_lightning_cp"
_log = logging.getLogger("lightning_cp")


@dataclass(eq=False)
class ParallelPipeline:
    """What a parallel pipeline carries.

    Attributes:
        ranks: who shares a sample with whom.
        transformers: by the name of the component.
        decoders: names of the autoencoders that encode and decode in parallel.
        calls: of transformers, how many of the last call were shared out by branch among them.
        shard: names of the components whose weights are spread over ranks.
        stages: where components lie when; None where they stay together.
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
) -> None:
    """Run any diffusers pipeline context-parallel from now on: call it on every rank, as one process would.

    **All ranks that share a sample draw the same noise.** At each call, the `torch.Generator`s that it is given, and
    torch's own random states (from which noise comes without a generator), are set to those of the first of these
    ranks. Other arguments must be equal, and are compared. Every rank returns the whole result, and runs the callbacks.

    World = data x cfg x ring x ulysses ranks. Data groups may be called with different prompts (`sample_prompts`).

    Args:
        pipe: a `DiffusionPipeline` or `ModularPipeline`; every component with a plan (both experts of Wan)
            is made parallel.
        parallel_config: `ContextParallelConfig` or `ParallelConfig`, lightning_cp's or diffusers'.
        cfg: parts of the ranks among which the branches of guidance are shared out: 2 for classifier-free guidance.
        vae: encode and decode in parallel too; "auto": where the autoencoder's class can.
        shard: components whose layers' weights are spread over ranks (FSDP2), for pipelines that do not fit. They are
            moved to the rank's device, layer by layer. There is no way back.
        stages: which components are on the rank's device when. "offload": those of a stage (encode, denoise, decode),
            and the others in host memory. "release": the same for one single call, and what a stage no longer needs is
            freed for good. Components may lie in host memory when this is called.
        kernel: as of the strategies.
        check_peers: how often transformers' arguments are compared, as of the strategies.
    Ranks: the whole world.
    Raises: ValueError, TypeError: settings, or components that cannot be parallel. The pipeline is then as it was.
    """
    components = components_of(pipe)
    if parallel_pipeline(pipe) is not None:
        raise PlanError(f"{type(pipe).__name__} is context-parallel already: call unparallelize_pipeline first")
    _check_started()
    config, cfg = context_config(parallel_config), check_degree("cfg", cfg, default=1)
    found = transformers_of(pipe, components)
    refuse_processor_swaps(pipe)
    ranks = branches_for(config, cfg)
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
            installed[name] = parallelize(module, config, kernel=kernel, check_peers=check_peers)
            undo.append(lambda module=module: remove_context_parallel(module))  # type: ignore[misc]
        calls = BranchCalls(type(pipe).__name__, ranks)
        undo += [intercept_calls(found[name], _shared_out(calls, one)) for name, one in installed.items()]
        scheduler = components.get("scheduler")
        if ranks.cfg > 1 and hasattr(scheduler, "step"):  # no promise is to outlive its step, and reach a callback
            undo.append(intercept_method(scheduler, "step", _with_kept_promises))
        decoders = share_decoders(components, vae, ranks, undo)
        if staged is not None:
            follow_stages(staged, undo)
        undo.append(intercept_calls(pipe, _together(pipe, calls, staged, check), **_places(staged)))
        undo.append(only_one_shows_progress(pipe, shows=(ranks.data_rank, ranks.sample.context_rank) == (0, 0)))
        shard_layers(layers, components, found, ranks)  # last, since there is no way back
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
            f"shard={list(installed.shard)}: weights that are spread over ranks cannot be made whole again in place: "
            f"load the {type(pipe).__name__} again"
        )
    undo_all(installed.undo)
    del pipe.__dict__[_INSTALLED]


def parallel_pipeline(pipe: Any) -> ParallelPipeline | None:
    """What `parallelize_pipeline` left on a pipeline; None for one that is not parallel."""
    found: ParallelPipeline | None = getattr(pipe, "__dict__", {}).get(_INSTALLED)
    return found


def _shared_out(calls: BranchCalls, installed: Installed) -> Around:
    """Around a transformer. Outside of this pipeline's calls nobody has seen to equal noise: peers are compared."""

    def around(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if calls.is_active and calls.branches.cfg > 1:
            return calls.call(installed.module, call, args, kwargs)
        if not calls.is_active:
            installed.session.peers.compare_next_in_full()
        return call(*args, **kwargs)

    return around


def _with_kept_promises(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call(*resolve_all(args), **resolve_all(kwargs))


def _together(pipe: Any, calls: BranchCalls, stages: Stages | None, check: Callable[[], None]) -> Around:
    """Around a call of the pipeline, on every rank."""
    signature = inspect.signature(type(pipe).__call__)

    def around(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = arguments_by_name(signature, args, kwargs)
        check()
        sync_rng_and_check_inputs(given, calls.branches.sample)
        calls.begin(may_wait=guidance_may_wait(pipe, given))
        try:
            with nullcontext() if stages is None else stages.call(given):
                return resolve_all(call(*args, **kwargs))
        finally:
            calls.end()

    return around


def _places(stages: Stages | None) -> dict[str, Any]:
    """What a pipeline says of its device, which diffusers reads from components, wherever these lie."""
    if stages is None:
        return {}
    device = property(lambda pipe: stages.device)
    return {"device": device, "_execution_device": device}


def _check_started() -> None:
    world = os.environ.get("WORLD_SIZE", "1")
    if world not in ("", "1") and not dist.is_initialized():
        raise ValueError(
            f"a launcher started {world} ranks (WORLD_SIZE), but there is no process group, so each would sample "
            "everything alone: call torch.distributed.init_process_group first"
        )


def _describe(pipe: Any, config: ContextParallelConfig) -> None:
    installed = parallel_pipeline(pipe)
    assert installed is not None, "it has just been made parallel"
    ranks = installed.ranks
    if (ranks.data_rank, ranks.sample.context_rank) == (0, 0):
        degrees = f"data {ranks.data_size} × cfg {ranks.cfg} × ring {config.ring} × ulysses {config.ulysses}"
        parts = ", ".join([*installed.transformers, *installed.decoders])
        total = ranks.data_size * ranks.sample.context_size
        _log.info("%s: %d ranks = %s; parallel: %s", type(pipe).__name__, total, degrees, parts)
