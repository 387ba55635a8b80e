"""Wrappers around the calls of a parallel pipeline and of its components."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from lightning_cp.engine.apply import Installed
from lightning_cp.launch.stall import watching_this_thread
from lightning_cp.pipelines.adapters import adapter_state
from lightning_cp.pipelines.calls import arguments_by_name
from lightning_cp.pipelines.equal_calls import check_equal, check_equal_results, sync_rng_and_check_inputs
from lightning_cp.pipelines.error_votes import Votes
from lightning_cp.pipelines.guidance.branches import BranchRunner, guidance_may_start_late, refuse_unequal_lengths
from lightning_cp.pipelines.lazy_tensor import resolve_all
from lightning_cp.pipelines.pipefusion.runner import PatchRunner, refuse_caches
from lightning_cp.pipelines.placement.component_stages import ComponentStages
from lightning_cp.pipelines.state import ParallelPipeline
from lightning_cp.undoable import Around, Undo, intercept_method, undo_all

# Callbacks of a pipeline read the latents after each step, and may raise on one rank.
_CALLBACKS = ("callback_on_step_end", "callback")


def over_branches(runner: BranchRunner, votes: Votes, installed: Installed, in_patches: PatchRunner | None) -> Around:
    """Wrap a transformer's calls. Outside this pipeline's calls the RNG is not synchronised: inputs are compared."""

    def around(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        compute = call if in_patches is None else partial(_in_patches, in_patches, call)
        staged = None if in_patches is None or in_patches.stage is None else in_patches
        if not runner.is_active:
            if in_patches is not None:
                refuse_caches(installed)
                in_patches.begin()  # a call on its own computes the whole sequence
            if staged is not None and runner.ranks.cfg > 1:  # one branch computes it for all
                check_equal(type(installed.module).__name__, {"args": args, **kwargs}, runner.ranks.sample)
            installed.session.peers.compare_next_in_full()
            return resolve_all(compute(*args, **kwargs))
        with votes.before_exchanges():
            if runner.ranks.cfg == 1:
                return compute(*args, **kwargs)
            if staged is not None:
                if staged.patches > 1:
                    refuse_unequal_lengths(installed, runner.ranks.cfg, args, kwargs)
                return runner.call_in_stages(installed, partial(staged.call, call), args, kwargs)
            return runner.call(installed, compute, args, kwargs)

    return around


def _in_patches(in_patches: PatchRunner, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return in_patches.call(compute, args, kwargs)


def _with_resolved_tensors(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call(*resolve_all(args), **resolve_all(kwargs))


def vote_before(
    votes: Votes, components: Mapping[str, Any], decoders: Sequence[str], sharded: Sequence[str]
) -> Iterator[Undo]:
    """Make the ranks vote before calls of parallel VAEs and of sharded encoders, which have exchanges too."""

    def around(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with votes.before_exchanges():
            return call(*args, **kwargs)

    for name in decoders:
        for method in ("decode", "encode"):
            if hasattr(components[name], method):
                yield intercept_method(components[name], method, around)
    for name in sharded:
        yield components[name].register_forward_pre_hook(lambda *_: votes.check(), prepend=True).remove


def synchronized(state: ParallelPipeline) -> Around:
    """Wrap the pipeline's calls: check components, sync the RNG, compare inputs, run the stages, resolve results.

    Step caches start empty in each call, also after one that failed.
    """
    pipe = state.pipeline
    signature = inspect.signature(type(pipe).__call__)
    runner, votes, component_stages = state.branch_runner, state.votes, state.component_stages
    in_patches = state.patch_runners.values()

    def around(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = arguments_by_name(signature, args, kwargs)
        with watching_this_thread(), votes.call():
            state.check()
            _empty_caches(state)
            common: dict[str, Any] = {
                f"step caches of {name}": one.caches.settings() for name, one in state.installed.items()
            }
            common |= adapter_state(pipe.components) | state.equal_components.settings(pipe, state.transformers)
            with votes.before_exchanges():
                sync_rng_and_check_inputs(arguments, state.ranks.sample, common)
                state.equal_components.compare_weights(pipe.components)
                _drop_graphs(state)
            for one in in_patches:
                one.begin(overlaps=not any(arguments.get(name) for name in _CALLBACKS))
            runner.begin(may_start_late=guidance_may_start_late(pipe, arguments))
            undo = _watch_steps(state)
            try:
                with nullcontext() if component_stages is None else component_stages.call(arguments):
                    result = resolve_all(call(*args, **kwargs))
                for installed in state.installed.values():  # so that no later call raises a difference of this one
                    installed.session.peers.finish()
                if state.settings.check_peers != "off":
                    check_equal_results(state.name, result, state.ranks.sample, votes)
                return result
            finally:
                undo_all(undo)
                runner.end()
                for one in in_patches:
                    one.end()
                for installed in state.installed.values():
                    installed.session.peers.drop()

    return around


def _watch_steps(state: ParallelPipeline) -> list[Undo]:
    """Wrap methods of the scheduler that this call uses: it may be exchanged between calls."""
    scheduler = getattr(state.pipeline, "scheduler", None)  # `components` lacks optional ones
    around_step: list[Around] = []
    if state.patch_runners:
        around_step.append(state.clock.before_step)
    if state.settings.num_stages == 1 and state.ranks.cfg > 1:  # callbacks get real tensors
        around_step.append(_with_resolved_tensors)

    def before_loop(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for one in state.patch_runners.values():
            one.begin_loop()
        return call(*args, **kwargs)

    undo = [intercept_method(scheduler, "step", around) for around in around_step if hasattr(scheduler, "step")]
    if state.patch_runners and hasattr(scheduler, "set_timesteps"):
        undo.append(intercept_method(scheduler, "set_timesteps", before_loop))
    return undo


def _empty_caches(state: ParallelPipeline) -> None:
    """Empty the step caches. Raises: PlanError: there is one, but the pipeline computes steps in patches."""
    for installed in state.installed.values():
        if state.patch_runners:
            refuse_caches(installed)
        else:
            installed.caches.follow()
            installed.caches.reset()


def _drop_graphs(state: ParallelPipeline) -> None:
    """Drop all CUDA graphs on all ranks if weights were moved on one of them. Ranks: all that share a sample."""
    graphs = state.graphs.values()
    if graphs and not state.votes.agree(not any(one.must_drop() for one in graphs)):
        for one in graphs:
            one.drop()


def device_properties(stages: ComponentStages | None) -> dict[str, Any]:
    """Return properties that fix the pipeline's device, which diffusers otherwise reads from offloaded components."""
    if stages is None:
        return {}
    device = property(lambda pipe: stages.device)
    return {"device": device, "_execution_device": device}
