"""Compute a pipeline's transformer calls in patches, with keys of the previous step for later patches (PipeFusion).

The result depends on the number of patches and of whole evaluations only. It does not depend on the number of stages
of blocks, nor on ring or Ulysses degrees. Source: Fang et al., arXiv:2405.14430.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from lightning_cp.engine.installed import Installed
from lightning_cp.errors import PlanError, ShapeError
from lightning_cp.nest import of_type
from lightning_cp.pipelines.calls import arguments_by_name
from lightning_cp.pipelines.error_votes import Votes
from lightning_cp.pipelines.guidance.branches import needs_gradients, refuse_kept_keys
from lightning_cp.pipelines.lazy_tensor import with_buffers
from lightning_cp.pipelines.pipefusion.evaluation import current_evaluation
from lightning_cp.pipelines.pipefusion.links import StageFailedError
from lightning_cp.pipelines.pipefusion.once_per_step import run_once
from lightning_cp.pipelines.pipefusion.patch_branches import PatchBranch, PatchBranches
from lightning_cp.pipelines.pipefusion.stage_results import StageResults
from lightning_cp.pipelines.pipefusion.stages import BlockStage, release_others
from lightning_cp.pipelines.result_layout import key_of
from lightning_cp.pipelines.samples import divide_samples, join_samples, main_argument
from lightning_cp.undoable import Undo

_MICRO_BATCHES_PER_STAGE = 4  # as GPipe: with more, calls get small and the stages wait little less


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
        plan = self.installed.rules.patches
        overlaps = self.patches == 1 or (plan is not None and plan.overlaps)
        self.results.enter(self.stage, (key, len(forwards)), call, overlaps=overlaps)
        if is_own:
            return self._run_in(branch, partial(self._run_stage, compute, forwards, key, branch.owner))
        branch.done += 1
        samples = self._samples(forwards)
        return self.results.receive(self.stage, (key, len(forwards)), len(forwards), branch.owner, samples)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """Identify the shapes in a forward: by those of its arguments, and by the numbers of tokens without padding."""
        plan = self.installed.rules.patches
        assert plan is not None, "parallelize_pipeline refuses other classes"
        arguments = arguments_by_name(self.installed.signature, args, kwargs)
        masks = of_type(torch.Tensor, [arguments.get(name) for name in plan.masks])
        return key_of((args, kwargs)), tuple(tuple(mask.sum(-1).flatten().tolist()) for mask in masks)

    def _forwards(self, branch: PatchBranch, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> list[_Forward]:
        """Return the forwards of a call: one for each patch or micro-batch, or one for the whole."""
        if self.patches == 1:
            assert self.stage is not None, "there are stages or patches"
            plan = self.installed.rules.patches
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
