"""Compute a pipeline's transformer calls in patches, with keys of the previous step for later patches (PipeFusion).

The result depends on the number of patches and of whole evaluations only. It does not depend on the number of stages
of blocks, nor on ring or Ulysses degrees. Source: Fang et al., arXiv:2405.14430.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lightning_cp.config import check_degree
from lightning_cp.engine.installed import Installed
from lightning_cp.engine.patches import Evaluation
from lightning_cp.engine.paths import submodule
from lightning_cp.errors import PlanError, ShapeError
from lightning_cp.nest import of_type
from lightning_cp.patching import Undo, intercept_calls, intercept_method
from lightning_cp.pipelines.block_stages import BlockStage, blocks_of, make_stage, release_others
from lightning_cp.pipelines.branches import refuse_kept_keys
from lightning_cp.pipelines.buffer_memory import check_buffers_fit
from lightning_cp.pipelines.forms import key_of
from lightning_cp.pipelines.lazy_tensor import resolve_all
from lightning_cp.pipelines.run_once import run_once
from lightning_cp.pipelines.samples import join_samples, main_argument, micro_batches
from lightning_cp.pipelines.stage_results import StageResults
from lightning_cp.pipelines.step_clock import StepClock
from lightning_cp.pipelines.votes import Votes
from lightning_cp.sample_groups import SampleGroups

_MICRO_BATCHES_PER_STAGE = 4  # as GPipe: with more, calls get small and the stages wait little less


@dataclass(eq=False)
class _Branch:
    """State of one branch of guidance: number of evaluations so far, and the buffers."""

    evaluation: Evaluation
    done: int = 0


@dataclass(eq=False)
class PatchCalls:
    """Computes the calls of one transformer in patches.

    Attributes:
        patches: number of patches. warmup: number of first evaluations of each branch that compute the whole sequence.
        clock: distinguishes the branches of guidance.
        stage: this rank's stage of the blocks; None: all blocks are on this rank.
        results: shares the results of the last stage; None: all blocks are on this rank.
        branches: state of each branch, by name or index; forgotten before each call of the pipeline.
    """

    installed: Installed
    patches: int
    warmup: int
    clock: StepClock
    stage: BlockStage | None = None
    results: StageResults | None = None
    branches: dict[Any, _Branch] = field(default_factory=dict)
    _context: str | None = None

    def install(self) -> list[Undo]:
        """Follow the names that a pipeline gives to the branches of guidance (`cache_context`); check the memory."""
        module, blocks = self.installed.module, blocks_of(self.installed)
        undo = [] if self.stage is None else self.stage.install()
        if self.patches > 1:
            own = blocks if self.stage is None else [blocks[i] for i in self.stage.own]
            undo.append(intercept_calls(submodule(module, own[0]), partial(self._first_block, own)))
        named = [intercept_method(module, "cache_context", self._named)] if hasattr(module, "cache_context") else []
        return [*undo, *named, *run_once(self.installed)]

    def reset(self) -> None:
        """Forget all branches, before and after a call of the pipeline."""
        self.branches, self._context = {}, None
        self.clock.reset()
        if self.results is not None:
            self.results.reset()

    def release(self) -> None:
        """Free the weights of the blocks of other stages. This cannot be undone."""
        if self.stage is not None:
            release_others(self.stage)

    def call(self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Evaluate the transformer once. Ranks: all stages, with equal arguments; all of each context group."""
        args, kwargs = resolve_all((args, kwargs))
        refuse_kept_keys(self.installed, args, kwargs, "with stages of blocks or patches")
        if torch.is_grad_enabled():
            self._refuse_gradients(args, kwargs)
        key = key_of((args, kwargs))
        if self.patches == 1:  # no keys are kept, so branches need no separate state
            result = self._in_micro_batches(compute, args, kwargs)
        else:
            result = self._in_branch(compute, args, kwargs, key)
        if self.stage is None or self.results is None:
            return result
        return self.results.broadcast(self.stage, result, key)

    def _refuse_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises: PlanError: a weight or an argument requires a gradient."""
        module = self.installed.module
        if any(x.requires_grad for x in of_type(torch.Tensor, (list(module.parameters()), args, kwargs))):
            raise PlanError(
                f"patches and stages of blocks are for sampling only, but {type(module).__name__} is called with "
                "gradients enabled: use torch.no_grad()"
            )

    def _in_branch(self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> Any:
        """Evaluate one branch of guidance: whole in its first `warmup` evaluations, then in patches."""
        branch, session = self._branch(), self.installed.session
        session.evaluation = branch.evaluation
        try:
            if branch.done < self.warmup:
                result = self._forward(compute, args, kwargs, None, key)
            else:
                result = self._in_patches(compute, args, kwargs, key)
        finally:
            session.evaluation = None
            branch.evaluation.end()
        branch.done += 1
        return result

    def _in_patches(self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> Any:
        result = None
        for patch in range(self.patches):
            if self.stage is not None:
                self.stage.links.expect([(key, x) for x in range(patch, min(patch + 2, self.patches))])
            result = self._forward(compute, args, kwargs, patch, (key, patch))
        return result  # the last patch completes the output

    def _in_micro_batches(self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute groups of samples one after another, so that all stages have work at the same time."""
        stage = self.stage
        assert stage is not None, "there are stages or patches"
        module = self.installed.module
        plan = self.installed.rules.patches
        most = _MICRO_BATCHES_PER_STAGE * stage.count if plan is not None and plan.samples else 1
        batches = micro_batches(module, args, kwargs, most)
        keys = [(key_of(batch), i) for i, batch in enumerate(batches)]
        found = []
        for i, (own_args, own_kwargs) in enumerate(batches):
            stage.links.expect(keys[i : i + 2])
            found.append(stage.forward(compute, own_args, own_kwargs, keys[i]))
        if not stage.is_last or stage.error is not None or len(batches) == 1:
            return found[-1]
        try:
            return join_samples(found, [len(main_argument(module, *batch)) for batch in batches])
        except ShapeError as error:
            stage.error = error
            return None

    def _forward(
        self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], patch: int | None, key: Any
    ) -> Any:
        evaluation = self.installed.session.evaluation
        if evaluation is not None:
            evaluation.begin(patch)
        if self.stage is None:
            return compute(*args, **kwargs)
        return self.stage.forward(compute, args, kwargs, key)

    def _first_block(self, own: list[str], call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the first of this rank's blocks. If it fills new buffers, check that those of the others fit too."""
        evaluation = self.installed.session.evaluation
        before = 0 if evaluation is None else len(evaluation.buffers)
        result = call(*args, **kwargs)
        if evaluation is not None and evaluation.buffers[before:]:
            check_buffers_fit(self.installed, own, evaluation.buffers[before:], patches=self.patches)
        return result

    def _branch(self) -> _Branch:
        name = self._context if self._context is not None else self.clock.next_call(self.installed.module)
        if name not in self.branches:
            plan = self.installed.rules.patches
            assert plan is not None, "parallelize_pipeline refuses other classes"
            self.branches[name] = _Branch(Evaluation(self.patches, plan.order))
        return self.branches[name]

    def _named(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = args[0] if args else kwargs.get("name")
        return self._in_context(call(*args, **kwargs), str(name))

    @contextmanager
    def _in_context(self, context: Any, name: str) -> Iterator[Any]:
        before, self._context = self._context, name
        try:
            with context as entered:
                yield entered
        finally:
            self._context = before


def make_patch_calls(
    transformers: Mapping[str, Installed],
    ranks: SampleGroups,
    votes: Votes,
    *,
    pipe: int | Sequence[int],
    patches: int,
    warmup: int,
    clock: StepClock,
) -> dict[str, PatchCalls]:
    """Prepare all transformers of a pipeline; none if neither patches nor stages are used.

    Raises: PlanError: a class cannot be computed in patches or stages, or has a step cache. ValueError: more stages
        than blocks.
    """
    if ranks.pipe == patches == 1:
        return {}
    found = {}
    # With CFG parallelism, `BranchCalls` makes the results lazy.
    results = StageResults(ranks.pipe_groups, votes, is_lazy=ranks.cfg == 1) if ranks.pipe > 1 else None
    for name, installed in transformers.items():
        kind, plan = type(installed.module).__name__, installed.rules.patches
        if plan is None:
            raise PlanError(
                f"{kind} cannot be computed in patches or stages: its plan does not support it "
                "(docs/pipefusion.md lists the classes that do): use patches=1 and pipe=1"
            )
        if ranks.pipe > 1 and not plan.stages:
            raise PlanError(
                f"pipe={ranks.pipe}: the blocks of {kind} need outputs of other blocks than the one before, so they "
                "cannot be divided into stages: use pipe=1"
            )
        refuse_caches(installed)
        for path in blocks_of(installed):
            if submodule(installed.module, path).__dict__.get("_compiled_call_impl") is not None:
                raise PlanError(
                    f"{path} of {kind} is compiled, which patches and stages do not support: do not compile it"
                )
        counts = None if isinstance(pipe, int) else pipe
        stage = make_stage(installed, ranks.pipe_groups, counts) if ranks.pipe > 1 else None
        found[name] = PatchCalls(installed, patches, warmup, clock, stage, results)
    return found


def refuse_caches(installed: Installed) -> None:
    """Refuse step caches on a transformer that is computed in patches or stages. Raises: PlanError."""
    installed.caches.follow()
    if installed.caches:
        raise PlanError(
            f"{installed.caches.kinds[0].name} on {type(installed.module).__name__} with pipe or patches above 1: step "
            "caches expect one forward for each step, over all blocks: call disable_cache(), or leave out pipe and "
            "patches"
        )


def check_patches(pipe: object, patches: object, warmup: object) -> int:
    """Check the settings. Returns: the number of stages. Raises: TypeError, ValueError: naming the setting."""
    stages = check_degree("pipe", len(pipe) if isinstance(pipe, (list, tuple)) else pipe, default=1)
    if check_degree("patches", patches, default=1) == 1 and warmup != 1:
        raise ValueError(f"warmup={warmup} has no meaning with patches=1, which is exact: leave it out")
    check_degree("warmup", warmup, default=1)
    return stages
