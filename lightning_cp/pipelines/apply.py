"""Make a pipeline context-parallel in place (`parallelize_pipeline`), and undo it (`unparallelize_pipeline`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from lightning_cp.compat.check import check_private_uses
from lightning_cp.config import ContextParallelConfig, check_degree, context_config
from lightning_cp.engine.apply import parallelize, remove_context_parallel
from lightning_cp.engine.meta import load_deferred
from lightning_cp.errors import PlanError
from lightning_cp.patching import intercept_calls, undo_all
from lightning_cp.pipelines.adapters import adapt_stages, allow_hotswap
from lightning_cp.pipelines.agreement import agreed_settings
from lightning_cp.pipelines.calls import only_one_shows_progress
from lightning_cp.pipelines.components import components_of, experts_of, share_decoders, transformers_of
from lightning_cp.pipelines.degrees import declared_degrees
from lightning_cp.pipelines.equal_components import EqualComponents
from lightning_cp.pipelines.equal_steps import EqualSteps
from lightning_cp.pipelines.error_votes import Votes
from lightning_cp.pipelines.guidance.branches import BranchCalls
from lightning_cp.pipelines.guidance.controlnets import controlnets_of, parallelize_controlnets
from lightning_cp.pipelines.guidance.perturbing import check_guiders, refuse_processor_swaps
from lightning_cp.pipelines.guidance.step_clock import StepClock
from lightning_cp.pipelines.pipefusion.patch_calls import PatchCalls
from lightning_cp.pipelines.pipefusion.patch_setup import check_patches, make_patch_calls
from lightning_cp.pipelines.placement.component_stages import Setting, follow_stages, make_stages
from lightning_cp.pipelines.placement.sharding import (
    check_placement,
    layers_to_shard,
    mark_unusable,
    rank_device,
    shard_layers,
)
from lightning_cp.pipelines.stall_watch import share_watch
from lightning_cp.pipelines.state import INSTALLED, ParallelPipeline, copy_refusals, parallel_pipeline
from lightning_cp.pipelines.wrappers import (
    device_properties,
    over_branches,
    synchronized,
    vote_before,
    with_resolved_tensors,
)
from lightning_cp.rules import STALL_S
from lightning_cp.sample_groups import sample_groups_for
from lightning_cp.shares import show_shares

_log = logging.getLogger("lightning_cp")


def parallelize_pipeline(
    pipeline: Any,
    /,
    parallel_config: object,
    *,
    cfg: int = 1,
    degrees: Mapping[str, Mapping[str, int]] | None = None,
    pipe: int | Sequence[int] = 1,
    patches: int = 1,
    warmup: int = 1,
    vae: bool | Literal["auto"] = "auto",
    shard: Sequence[str] = (),
    stages: Setting = "together",
    kernel: str = "auto",
    check_peers: str = "sampled",
    stall_s: float | None = 60.0,
    shares: Sequence[float] | None = None,
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
        pipeline: a `DiffusionPipeline` or `ModularPipeline`. Every component with a plan is made parallel (both experts
            of Wan).
        parallel_config: `ContextParallelConfig` or `ParallelConfig`, lightning_cp's or diffusers'.
        cfg: CFG degree: number of groups that compute branches of guidance in parallel. 2 for classifier-free guidance.
        degrees: other degrees that a call may use (`use_degrees`), by name: {"guided": {"ring": 2, "cfg": 2}}. Degrees
            left out are 1. Each must use as many ranks per sample as `parallel_config` and `cfg`; with a sharded
            transformer `cfg` must be the same. Not with `pipe`, `patches` or `shares`.
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
            context peers, with the same values as for the strategies. Unless it is "off", components, steps and results
            are compared between all ranks that share a sample; with "first", steps and results of 2 calls only.
        stall_s: seconds until a stalled collective is reported, with the activity of every rank; None: never. A watch
            of another pipeline or of a strategy is shared, with its setting.
        shares: for unequal devices, a positive weight for each rank of a context group, in rank order: [2, 1] gives the
            first rank two thirds of the tokens, of the heads with Ulysses, and of the autoencoder's rows or tiles. All
            context groups use the same. None: equal.
    Ranks: the whole world. (Settings are compared between ranks, except on a rank where all degrees are 1.)
    Raises:
        ValueError, TypeError: invalid settings, or components that cannot be parallel. The pipeline is unchanged,
            unless layers were already sharded: it then raises at every call.
        PeerMismatchError: ranks have different settings.
        CallFailedError: another rank has raised an error.
    """
    check_private_uses("pipeline")
    common = {**_degrees_of(parallel_config), "cfg": cfg, "pipe": pipe}
    is_alone = all(degree in (None, 1) for degree in common.values())
    common |= {"degrees": degrees, "patches": patches, "warmup": warmup, "vae": vae, "shard": shard, "stages": stages}
    common |= {"check_peers": check_peers, "stall_s": stall_s, "shares": shares}
    with nullcontext() if is_alone else agreed_settings(f"make the {type(pipeline).__name__} parallel", common):
        components = components_of(pipeline)
        if parallel_pipeline(pipeline) is not None:
            raise PlanError(f"{type(pipeline).__name__} is already context-parallel: call unparallelize_pipeline first")
        _check_started()
        if not STALL_S.passes(stall_s):
            raise ValueError(f"stall_s={stall_s!r} must be {STALL_S.describe().replace('null', 'None')}")
        config, cfg = context_config(parallel_config), check_degree("cfg", cfg, default=1)
        num_stages = check_patches(pipe, patches, warmup)
        found, controlnets = transformers_of(pipeline, components), controlnets_of(components)
        both = [name for name in shard if name in found]
        if num_stages > 1 and both:
            raise ValueError(
                f"shard={both} and pipe={pipe}: a rank holds its stage's blocks whole, so leave one of them out"
            )
        refuse_processor_swaps(pipeline)
    ranks = sample_groups_for(config, cfg, num_stages, shares=shares)
    votes = Votes(type(pipeline).__name__, ranks.control)
    undo = share_watch(stall_s, ranks)
    layers: dict[str, list[nn.Module]] = {}
    in_patches: dict[str, PatchCalls] = {}
    try:
        with votes.call():  # what one rank refuses, or cannot load, ends this on all
            layers = layers_to_shard(components, shard, found, ranks)
            staged = make_stages(pipeline, stages, components, found, rank_device(ranks))

            def check() -> None:
                check_placement(pipeline, components, found, shard=layers, stages=stages)
                check_guiders(pipeline, ranks)

            check()
            if degrees and (num_stages > 1 or patches > 1 or shares is not None):
                raise ValueError(f"degrees={sorted(degrees)} cannot be combined with pipe, patches or shares")
            sharded = next((name for name in layers if name in found), None)
            chosen = declared_degrees(degrees or {}, config, ranks, sharded=sharded)
            installed = {}
            for name, module in found.items():
                installed[name] = parallelize(module, config, kernel=kernel, check_peers=check_peers, shares=shares)
                undo.append(lambda module=module: remove_context_parallel(module))  # type: ignore[misc]
            calls, clock = BranchCalls(type(pipeline).__name__, ranks), StepClock(must_be_equal=patches > 1)
            in_patches = make_patch_calls(
                installed,
                ranks,
                votes,
                pipe=pipe,
                patches=patches,
                warmup=warmup,
                clock=clock,
                experts=experts_of(pipeline, found),
                is_guided=lambda: bool(getattr(pipeline, "do_classifier_free_guidance", False)),
                on_step=calls.count_step,
            )
            for one in in_patches.values():
                undo += one.install()
            calls.pending.before_flush = votes.check
            settings = {"kernel": kernel, "check_peers": check_peers}
            steering = parallelize_controlnets(controlnets, config, calls, votes, undo, **settings)
            undo += [
                intercept_calls(found[name], over_branches(calls, votes, one, in_patches.get(name)))
                for name, one in installed.items()
            ]
            adaptable = (*found.values(), *controlnets.values())
            undo += [allow_hotswap(module) for module in adaptable if hasattr(module, "load_lora_adapter")]
            for name in in_patches if num_stages > 1 else ():
                undo += adapt_stages(pipeline, found[name], pipe)
            around_step = [clock.before_step] if in_patches else []
            if num_stages == 1 and any(x.ranks.cfg > 1 for x in chosen.values()):  # callbacks get real tensors
                around_step.append(with_resolved_tensors)
            decoders = share_decoders(components, vae, ranks, undo)
            undo += vote_before(votes, components, decoders, [name for name in layers if name not in found])
            if staged is not None:
                follow_stages(staged, undo)
            compares = check_peers != "off"
            equal_components = EqualComponents(ranks.control, is_on=compares, in_stages=num_stages > 1)
            equal_steps = EqualSteps(
                type(pipeline).__name__,
                ranks.sample,
                votes,
                every_step=num_stages > 1 or any(one.ranks.cfg > 1 for one in chosen.values()),
                calls={"off": 0, "first": 2}.get(check_peers),
            )
            state = ParallelPipeline(
                ranks,
                installed,
                decoders,
                calls,
                votes,
                chosen,
                equal_components,
                equal_steps,
                controlnets=steering,
                shard=tuple(layers),
                stages=staged,
                patch_calls=in_patches,
                around_step=around_step,
                undo=undo,
            )
            attributes = {**device_properties(staged), **copy_refusals(type(pipeline).__name__)}
            undo.append(intercept_calls(pipeline, synchronized(pipeline, state, check), **attributes))
            undo.append(only_one_shows_progress(pipeline, shows=(ranks.data_rank, ranks.sample.context_rank) == (0, 0)))
            votes.check()  # this and the next steps cannot be undone
            if layers or num_stages > 1:
                equal_components.compare_weights(components)  # while they are whole
            shard_layers(layers, components, found, ranks)
            for one in in_patches.values():
                one.release()
            for module in found.values():
                load_deferred(module)
    except BaseException as error:
        undo_all(undo)
        mark_unusable(pipeline, layers, in_patches, error)
        raise
    if staged is not None:
        staged.offload_all()
    pipeline.__dict__[INSTALLED] = state
    _describe(pipeline, config)


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
    if installed.ranks.pipe > 1:
        raise PlanError(
            f"pipe={installed.ranks.pipe}: this rank has freed the blocks of other stages: load the "
            f"{type(pipe).__name__} again"
        )
    undo_all(installed.undo)
    del pipe.__dict__[INSTALLED]


def _degrees_of(parallel_config: object) -> dict[str, Any]:
    """Return the degrees of a configuration of any type that is accepted, and the names of the axes of its mesh."""
    config = getattr(parallel_config, "context_parallel_config", parallel_config)
    axes = getattr(getattr(config, "mesh", None), "mesh_dim_names", None)
    return {
        "ring": getattr(config, "ring_degree", None),
        "ulysses": getattr(config, "ulysses_degree", None),
        "mesh": axes,
    }


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
        stages = f"pipe {ranks.pipe} × " if ranks.pipe > 1 else ""
        degrees = f"data {ranks.data_size} × cfg {ranks.cfg} × {stages}ring {config.ring} × ulysses {config.ulysses}"
        degrees += show_shares(ranks.context.shares)
        names = ", ".join([*installed.transformers, *installed.controlnets, *installed.decoders])
        total = ranks.data_size * ranks.sample.context_size
        _log.info("%s: %d ranks = %s; parallel: %s", type(pipe).__name__, total, degrees, names)
