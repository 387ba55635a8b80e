"""Make a pipeline context-parallel in place (`parallelize_pipeline`), and undo it (`unparallelize_pipeline`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch.distributed as dist

from lightning_cp.compat.check import check_private_uses
from lightning_cp.errors import PlanError
from lightning_cp.mesh.degrees import show_shares
from lightning_cp.mesh.sample_groups import sample_groups_for
from lightning_cp.pipelines.components import components_of, planned_transformers, refuse_processor_swaps
from lightning_cp.pipelines.equal_calls import agreed_settings
from lightning_cp.pipelines.features import FEATURES, divide_weights
from lightning_cp.pipelines.guidance.controlnets import controlnets_of
from lightning_cp.pipelines.placement.sharding import mark_unusable
from lightning_cp.pipelines.settings import PipelineSettings, Placement
from lightning_cp.pipelines.state import INSTALLED, ParallelPipeline, parallel_pipeline
from lightning_cp.undoable import Feature

_log = logging.getLogger("lightning_cp")


def parallelize_pipeline(
    pipeline: Any,
    /,
    parallel_config: object,
    *,
    cfg: int = 1,
    pipe: int | Sequence[int] = 1,
    patches: int = 1,
    warmup: int = 1,
    vae: bool | Literal["auto"] = "auto",
    shard: Sequence[str] = (),
    stages: Placement = "together",
    kernel: str = "auto",
    check_peers: str = "sampled",
    stall_s: float | None = 60.0,
    shares: Sequence[float] | None = None,
    graphs: bool | Literal["auto"] = False,
) -> None:
    """Make a diffusers pipeline context-parallel, in place. Then call it on every rank as in one process.

    **All ranks that share a sample draw the same noise.** At each call, the given `torch.Generator`s and torch's
    default random states (used if no generator is given) are set to those of the first of these ranks. Other arguments
    must be equal, and are compared. Every rank returns the whole result and runs the callbacks.

    World size = data x cfg x pipe x ring x ulysses. Data groups may get different prompts (`sample_prompts`).

    With `patches` above 1, later steps reuse keys of the previous step, so the result is an approximation. It depends
    on `patches` and `warmup` only, not on the number of ranks. With patches=1 it is exact.

    A transformer without weights (`lightning_cp.finetune.meta_transformer`) loads the weights of this rank's stage of
    blocks into host memory; then move the pipeline to a device.

    Args:
        pipeline: a `DiffusionPipeline` or `ModularPipeline`. Every component with a plan is made parallel (both of
            two experts).
        parallel_config: `ContextParallelConfig` or `ParallelConfig`, lightning_cp's or diffusers'.
        cfg: CFG degree: number of groups that compute branches of guidance in parallel. 2 for classifier-free guidance.
        pipe: number of stages that the transformer's blocks are divided into, each on other ranks; or the number of
            blocks of each stage. A rank keeps the weights of its blocks only. This cannot be undone.
        patches: number of patches of a step (PipeFusion). Stages compute different patches at the same time.
        warmup: number of first steps that compute the whole sequence, for each branch of guidance.
        vae: True: encode and decode in parallel. "auto": if the autoencoder's class supports it. False: do not.
        shard: names of components to shard over ranks layer by layer (FSDP2), for pipelines that do not fit on one
            device. They are moved to the rank's device layer by layer. This cannot be undone.
        stages: "together": leave components where they are. "offload": keep only the components of the current stage
            (encode, denoise, decode) on the rank's device, the others in host memory. "release": move components to the
            device when needed and free their weights after their stage, so the pipeline can be called only once. With
            "offload" and "release", components may be in host memory when this is called.
        kernel: attention kernel by name; "auto" chooses by device, dtype and mask.
        check_peers: "first", "sampled", "always" or "off": how often the arguments of transformers are compared between
            context peers, with the same values as for the strategies. Unless it is "off", components and results are
            compared between all ranks that share a sample.
        stall_s: seconds until a stalled collective is reported; None: never. A watch
            of another pipeline or of a strategy is shared, with its setting.
        shares: for unequal devices, a positive weight for each rank of a context group, in rank order: [2, 1] gives the
            first rank two thirds of the tokens, of the heads with Ulysses, and of the autoencoder's rows or tiles. All
            context groups use the same. None: equal.
        graphs: True: run the forwards of transformers and ControlNets in CUDA graphs, which take almost no time of the
            host. "auto": only where the host, and not the GPU, limits the speed (measured in the third forward with
            arguments of a form). False: never. Forwards that cannot be captured, with step caches for example, run
            eagerly, and the reason is logged. Not with `pipe`, `patches` or a sharded transformer.
    Ranks: the whole world. (Settings are compared between ranks, except on a rank where all degrees are 1.)
    Raises:
        ValueError, TypeError: invalid settings, or components that cannot be parallel. The pipeline is unchanged,
            unless layers were already sharded: it then raises at every call.
        PeerMismatchError: ranks have different settings.
        CallFailedError: another rank has raised an error.
    """
    check_private_uses("pipeline")
    name, facts = type(pipeline).__name__, _facts_of(parallel_config)
    is_alone = all(x in (None, 1) for x in (facts["ring"], facts["ulysses"], facts["mesh"], cfg, pipe))
    options: dict[str, Any] = {"cfg": cfg, "pipe": pipe, "patches": patches, "warmup": warmup}
    options |= {"vae": vae, "shard": shard, "stages": stages, "check_peers": check_peers, "stall_s": stall_s}
    options |= {"shares": shares, "graphs": graphs}
    with nullcontext() if is_alone else agreed_settings(f"make the {name} parallel", facts | options):
        components = components_of(pipeline)
        if parallel_pipeline(pipeline) is not None:
            raise PlanError(f"{name} is already context-parallel: call unparallelize_pipeline first")
        _check_started()
        settings = PipelineSettings(parallel_config=parallel_config, kernel=kernel, **options)
        transformers, controlnets = planned_transformers(pipeline, components), controlnets_of(components)
        both = [one for one in settings.shard if one in transformers]
        if settings.graphs is True and both:
            raise ValueError(
                f"graphs=True and shard={both}: weights that are gathered layer by layer cannot be captured in a CUDA "
                "graph, so leave one of them out"
            )
        if settings.num_stages > 1 and both:
            raise ValueError(
                f"shard={both} and pipe={pipe}: a rank holds its stage's blocks whole, so leave one of them out"
            )
        refuse_processor_swaps(pipeline)
    ranks = sample_groups_for(settings.config, settings.cfg, settings.num_stages, shares=shares)
    state = ParallelPipeline(pipeline, settings, ranks, components, transformers, controlnets)
    state.features = [Feature(partial(changes, state)) for changes in FEATURES]
    try:
        with state.votes.call():  # what one rank refuses, or cannot load, ends this on all
            for feature in state.features:
                feature.install()
            state.votes.check()
            divide_weights(state)
    except BaseException as error:
        state.undo()
        mark_unusable(pipeline, state.layers, state.patch_runners, error)
        raise
    if state.component_stages is not None:
        state.component_stages.offload_all()
    pipeline.__dict__[INSTALLED] = state
    _describe(state)


def unparallelize_pipeline(pipe: Any) -> None:
    """Undo `parallelize_pipeline`. Raises: ValueError: the pipeline is not parallel, or its weights are sharded."""
    installed = parallel_pipeline(pipe)
    if installed is None:
        raise PlanError(f"{type(pipe).__name__} is not context-parallel: nothing to undo")
    if installed.settings.shard and installed.ranks.sample.context_size > 1:
        raise PlanError(
            f"shard={list(installed.settings.shard)}: sharded weights cannot be gathered in place: "
            f"load the {type(pipe).__name__} again"
        )
    if installed.ranks.pipe > 1:
        raise PlanError(
            f"pipe={installed.ranks.pipe}: this rank has freed the blocks of other stages: load the "
            f"{type(pipe).__name__} again"
        )
    installed.undo()
    del pipe.__dict__[INSTALLED]


def _facts_of(parallel_config: object) -> dict[str, Any]:
    """Return what all ranks must have alike to make their groups, of a configuration of any type that is accepted."""
    config = getattr(parallel_config, "context_parallel_config", parallel_config)
    return {
        "ring": getattr(config, "ring_degree", None),
        "ulysses": getattr(config, "ulysses_degree", None),
        "mesh": getattr(getattr(config, "mesh", None), "mesh_dim_names", None),
        "rotate_method": getattr(config, "rotate_method", None),
        "grid": getattr(config, "grid", None),
    }


def _check_started() -> None:
    world = os.environ.get("WORLD_SIZE", "1")
    if world not in ("", "1") and not dist.is_initialized():
        raise ValueError(
            f"WORLD_SIZE={world}, but there is no process group, so each rank would sample "
            "everything alone: call torch.distributed.init_process_group first"
        )


def _describe(state: ParallelPipeline) -> None:
    ranks, config = state.ranks, state.settings.config
    if (ranks.data_rank, ranks.sample.context_rank) == (0, 0):
        stages = f"pipe {ranks.pipe} × " if ranks.pipe > 1 else ""
        degrees = f"data {ranks.data_size} × cfg {ranks.cfg} × {stages}ring {config.ring} × ulysses {config.ulysses}"
        degrees += show_shares(ranks.context.shares)
        names = ", ".join([*state.transformers, *state.controlnets, *state.decoders])
        total = ranks.data_size * ranks.sample.context_size
        _log.info("%s: %d ranks = %s; parallel: %s", state.name, total, degrees, names)
