"""Compute a pipeline's transformer calls in patches, with keys of the previous step for later patches (PipeFusion).

The result depends on the number of patches and of whole evaluations only. It does not depend on the number of stages
of blocks, nor on ring or Ulysses degrees. Source: Fang et al., arXiv:2405.14430.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from lightning_cp.engine.installed import Installed
from lightning_cp.engine.paths import submodule
from lightning_cp.errors import PlanError, ShapeError
from lightning_cp.mesh.sample_groups import SampleGroups
from lightning_cp.nest import of_type
from lightning_cp.pipelines.calls import arguments_by_name
from lightning_cp.pipelines.error_votes import Votes
from lightning_cp.pipelines.guidance.branches import needs_gradients, refuse_kept_keys
from lightning_cp.pipelines.guidance.step_clock import StepClock
from lightning_cp.pipelines.lazy_tensor import with_buffers
from lightning_cp.pipelines.pipefusion.links import StageFailedError
from lightning_cp.pipelines.pipefusion.patches import PatchEvaluation, current_evaluation, run_once
from lightning_cp.pipelines.pipefusion.results import StageResults
from lightning_cp.pipelines.pipefusion.stages import BlockStage, blocks_of, make_stage, release_others
from lightning_cp.pipelines.pipefusion.transfers import ResultTransfers
from lightning_cp.pipelines.result_layout import key_of
from lightning_cp.pipelines.samples import divide_samples, join_samples, main_argument
from lightning_cp.undoable import Undo, intercept_method

_MICRO_BATCHES_PER_STAGE = 4  # as GPipe: with more, calls get small and the stages wait little less


@dataclass(eq=False)
class PatchBranch:
    """State of one branch of guidance: its buffers, the CFG rank that computes it, and its number of evaluations."""

    evaluation: PatchEvaluation
    owner: int = 0
    done: int = 0


@dataclass(eq=False)
class PatchBranches:
    """The branches of guidance of one transformer.

    Attributes:
        patches: number of patches.
        clock: distinguishes branches without names.
        cfg: number of CFG branches that compute them.
        experts: the branches of other transformers, if each transformer computes some of the steps: when
            a branch of this one begins, their keys are no longer needed.
        known: state of each branch, by its name or index, and by the CFG branch if this is given; forgotten before each
            call of the pipeline.
    """

    installed: Installed
    patches: int
    clock: StepClock
    cfg: int = 1
    experts: list[PatchBranches] = field(default_factory=list)
    known: dict[Any, PatchBranch] = field(default_factory=dict)
    _context: str | None = None

    def follow_names(self) -> list[Undo]:
        """Follow the names that a pipeline gives to the branches (`cache_context`)."""
        module = self.installed.module
        return [intercept_method(module, "cache_context", self._named)] if hasattr(module, "cache_context") else []

    def forget(self) -> None:
        """Forget all branches, and free their keys."""
        self.known, self._context = {}, None
        self.clock.reset()

    def current(self, owner: int | None = None) -> PatchBranch:
        """Return the branch of this call of the transformer. The same CFG branch computes it in all steps.

        Args: owner: the CFG branch that computes the call; None: they take turns.
        """
        context: str | int | None = self._context
        if context is None:  # all shares of a batch are one call
            context = (self.clock.this_call if owner else self.clock.next_call)(self.installed.module)
        name = (context, owner)  # two branches in one batch have the same context
        if name not in self.known:
            for other in self.experts:
                other.known = {}
            turn = self.clock.next_branch() % self.cfg
            self.known[name] = PatchBranch(self.new_evaluation(), turn if owner is None else owner)
        return self.known[name]

    def new_evaluation(self) -> PatchEvaluation:
        """Return an evaluation with empty buffers."""
        return PatchEvaluation.of(self.installed.session, self.patches)

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


class _Forward(NamedTuple):
    """One forward of a transformer call: its arguments, the patch, and what identifies its shapes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    patch: int | None
    key: Hashable


@dataclass(eq=False)
class PatchRunner:
    """Computes the calls of one transformer in patches.

    Attributes:
        patches: number of patches. warmup: number of first evaluations of each branch that compute the whole sequence.
        branches: the branches of guidance.
        stage: this rank's stage of the blocks, which may be the only one; None: no other rank needs the results.
        results: shares the results of the last stage with all stages of all CFG branches; None: see `stage`.
    """

    installed: Installed
    patches: int
    warmup: int
    branches: PatchBranches
    stage: BlockStage | None = None
    results: StageResults | None = None

    def install(self) -> list[Undo]:
        """Divide the blocks into stages, and follow the names of the branches of guidance."""
        undo = [] if self.stage is None else self.stage.install()
        return [*undo, *self.branches.follow_names(), *run_once(self.installed)]

    def begin(self, *, overlaps: bool = False) -> None:
        """Begin a call of the pipeline, or a call of the transformer on its own.

        Args: overlaps: the stages may begin a step before the step before is complete on all of them.
        """
        self._reset()
        if self.stage is not None:
            self.stage.links.forget_oldest()
        overlaps = overlaps and self.stage is not None and self.stage.count > 1
        self.branches.clock.resolves = not overlaps
        if self.results is not None:
            self.results.start(overlaps=overlaps)

    def begin_loop(self) -> None:
        """Begin a denoising loop in a call of the pipeline: it starts without the keys of the loop before.

        Some pipelines have one loop for each window of a long video, and other tokens in each. Ranks: all stages.
        """
        if self.results is not None:
            self.results.flush()
        self.branches.forget()

    def end(self) -> None:
        """End a call of the pipeline, also if it failed."""
        self._reset()
        if self.results is not None:
            self.results.reset()

    def _reset(self) -> None:
        self.branches.forget()
        if self.stage is not None:
            self.stage.reset()

    def release(self) -> None:
        """Free the weights of the blocks of other stages, if there are any. This cannot be undone."""
        if self.stage is not None and self.stage.count > 1:
            release_others(self.stage)

    def call(
        self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], owner: int | None = None
    ) -> Any:
        """Evaluate the transformer once.

        Args: owner: the CFG branch that computes this call; None: branches take turns.
        Ranks: all stages of all CFG branches, with equal arguments; all of each context group.
        """
        call = (args, kwargs)
        args, kwargs = with_buffers(call)
        refuse_kept_keys(self.installed, args, kwargs, "with stages of blocks or patches")
        if needs_gradients(self.installed.module, (args, kwargs)):
            raise PlanError(
                f"patches and stages of blocks are for sampling only, but {type(self.installed.module).__name__} is "
                "called with gradients enabled: use torch.no_grad()"
            )
        key = self._key(args, kwargs)
        branch = self.branches.current(owner)
        is_own = self.results is None or branch.owner == self.results.transfers.branch
        forwards = self._forwards(branch, args, kwargs, key)
        if self.results is None:
            return self._run_in(branch, partial(self._run, compute, forwards))
        assert self.stage is not None, "only a stage has results"
        plan = self.installed.model_plan.patches
        overlaps = self.patches == 1 or (plan is not None and plan.overlaps)
        self.results.enter(self.stage, (key, len(forwards)), call, overlaps=overlaps)
        if is_own:
            return self._run_in(branch, partial(self._run_stage, compute, forwards, key, branch.owner))
        branch.done += 1
        samples = self._samples(forwards)
        return self.results.receive(self.stage, (key, len(forwards)), len(forwards), branch.owner, samples)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """Identify the shapes in a forward: by those of its arguments, and by the numbers of tokens without padding."""
        plan = self.installed.model_plan.patches
        assert plan is not None, "parallelize_pipeline refuses other classes"
        arguments = arguments_by_name(self.installed.signature, args, kwargs)
        masks = of_type(torch.Tensor, [arguments.get(name) for name in plan.masks])
        return key_of((args, kwargs)), tuple(tuple(mask.sum(-1).flatten().tolist()) for mask in masks)

    def _forwards(self, branch: PatchBranch, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> list[_Forward]:
        """Return the forwards of a call: one for each patch or micro-batch, or one for the whole."""
        if self.patches == 1:
            assert self.stage is not None, "there are stages or patches"
            plan = self.installed.model_plan.patches
            most = _MICRO_BATCHES_PER_STAGE * self.stage.count if plan is not None and plan.samples else 1
            batches = divide_samples(self.installed.module, args, kwargs, most)
            return [_Forward(*batch, None, (self._key(*batch), i)) for i, batch in enumerate(batches)]
        if branch.done < self.warmup:
            return [_Forward(args, kwargs, None, key)]
        return [_Forward(args, kwargs, patch, (key, patch)) for patch in range(self.patches)]

    def _samples(self, forwards: list[_Forward]) -> list[int] | None:
        """Return the number of samples of each forward; None if a forward computes all samples."""
        if self.patches > 1 or len(forwards) == 1:
            return None
        return [len(main_argument(self.installed.module, x.args, x.kwargs)) for x in forwards]

    def _run_in(self, branch: PatchBranch, run: Callable[[], Any]) -> Any:
        """Run an evaluation of a branch, with its buffers. With one patch, no keys are kept."""
        try:
            with self.installed.session.evaluating(branch.evaluation if self.patches > 1 else None):
                return run()
        finally:
            branch.evaluation.end()
            branch.done += 1

    def _run(self, compute: Callable[..., Any], forwards: list[_Forward]) -> Any:
        output, evaluation = None, current_evaluation(self.installed.session)
        for forward in forwards:
            if evaluation is not None:
                evaluation.begin(forward.patch)
            output = compute(*forward.args, **forward.kwargs)
        return output  # the last patch completes it

    def _run_stage(self, compute: Callable[..., Any], forwards: list[_Forward], key: Any, owner: int) -> Any:
        """Run this stage of the forwards of a call. So all stages have work at the same time."""
        stage, results, evaluation = self.stage, self.results, current_evaluation(self.installed.session)
        assert stage is not None, "the caller checks it"
        assert results is not None, "the caller checks it"
        result = results.begin(stage, (key, len(forwards)), len(forwards), owner)
        samples, compute = self._samples(forwards), partial(_unless_interrupted, results.votes, compute)
        outputs, keys = [], [*(x.key for x in forwards), None]
        start_results = partial(results.transfers.start, newest=stage.links.later_stages)
        for i, forward in enumerate(forwards):
            stage.links.expect(keys[i], keys[i + 1], start_results)
            if not results.prepare(i):
                stage.error = stage.error or StageFailedError()
            if evaluation is not None:
                evaluation.begin(forward.patch)
            outputs.append(stage.forward(compute, forward.args, forward.kwargs, forward.key))
            results.transfers.put(result, i, outputs[-1], is_whole=samples is None)
            if stage.links.is_ahead:
                start_results()
        output = outputs[-1]
        if samples is not None and stage.is_last and stage.error is None:
            try:
                output = join_samples(outputs, samples)
            except ShapeError as error:
                stage.error = error
        return results.finish(result, output, samples)


def _unless_interrupted(votes: Votes, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute a forward, unless the call is to end: overlapping steps do not vote, but pass an error of a stage on."""
    votes.interrupt()
    return compute(*args, **kwargs)


def make_patch_runners(
    transformers: Mapping[str, Installed],
    ranks: SampleGroups,
    votes: Votes,
    *,
    pipe: int | Sequence[int],
    patches: int,
    warmup: int,
    clock: StepClock,
    experts: Collection[str] = (),
    on_step: Callable[[int], None] = lambda calls: None,
) -> dict[str, PatchRunner]:
    """Prepare all transformers of a pipeline; none if neither patches nor stages are used.

    Args:
        experts: names of the transformers, if each of them computes some of the steps.
        on_step: with stages, called with the number of transformer calls of each step.
    Raises: PlanError: a class cannot be computed in patches or stages, or has a step cache. ValueError: more stages
        than blocks.
    """
    if ranks.pipe == patches == 1:
        return {}
    patch_runners = {}
    results = None
    if ranks.pipe_results:
        assert ranks.control is not None, "several ranks share a sample"
        transfers = ResultTransfers(ranks.stages, ranks.pipe_results, ranks.control, ranks.cfg_rank)
        results = StageResults(transfers, votes, on_step)
    for name, installed in transformers.items():
        kind, plan = type(installed.module).__name__, installed.model_plan.patches
        if plan is None:
            raise PlanError(
                f"{kind} cannot be computed in patches or stages: its plan does not support it "
                "(docs/sampling.md lists the classes that do): use patches=1 and pipe=1"
            )
        if ranks.pipe > 1 and not plan.stages:
            raise PlanError(
                f"pipe={ranks.pipe}: {kind} needs outputs or weights of other blocks than the one before, so its "
                "blocks cannot be divided into stages: use pipe=1"
            )
        refuse_caches(installed)
        for path in ("", *blocks_of(installed)):
            if submodule(installed.module, path).__dict__.get("_compiled_call_impl") is not None:
                what = f"{path} of {kind}" if path else kind
                raise PlanError(f"{what} is compiled, which patches and stages do not support: do not compile it")
        counts = None if isinstance(pipe, int) else pipe
        stage = None if results is None else make_stage(installed, ranks.stages, transfers.control, counts)
        branches = PatchBranches(installed, patches, clock, ranks.cfg)
        patch_runners[name] = PatchRunner(installed, patches, warmup, branches, stage, results)
    for name in experts:
        patch_runners[name].branches.experts = [patch_runners[other].branches for other in experts if other != name]
    return patch_runners


def refuse_caches(installed: Installed) -> None:
    """Refuse step caches on a transformer that is computed in patches or stages. Raises: PlanError."""
    installed.caches.follow()
    if installed.caches:
        raise PlanError(
            f"{installed.caches.kinds[0].name} on {type(installed.module).__name__} with pipe or patches above 1: step "
            "caches expect one forward for each step, over all blocks: call disable_cache(), or leave out pipe and "
            "patches"
        )
