"""Results of the last stage for all other ranks: lazy tensors, so that no stage waits for the others between steps.

The operators of guidance and of the scheduler are deferred until something reads a value. If each patch (or
micro-batch) of a step depends on the same one of the step before (`step_overlap.py`), the first stage computes a patch
when this piece of the results has arrived. The other stages do not need the latents: they get the outputs of the stage
before. They complete the results of a step two steps later.

With CFG parallelism, the ranks of a branch get the results of the other branches in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cp.comm.transfer import Pending
from lightning_cp.compat.torch_names import is_functional
from lightning_cp.errors import CallFailedError
from lightning_cp.nest import of_type
from lightning_cp.pipelines.error_votes import Votes
from lightning_cp.pipelines.lazy_tensor import Deferred, LazyResults, LazyTensor, compute
from lightning_cp.pipelines.pipefusion.result_transfers import CallResult, ResultTransfers
from lightning_cp.pipelines.pipefusion.stages import BlockStage
from lightning_cp.pipelines.pipefusion.step_overlap import CARRIERS, PieceLabels


@dataclass(eq=False)
class _Step:
    """Results of a denoising step, and the operators that were deferred since its first transformer call."""

    results: list[CallResult] = field(default_factory=list)
    later: list[Deferred] = field(default_factory=list)


@dataclass(eq=False)
class StageResults(LazyResults):
    """The results of a pipeline's transformers on this stage.

    Attributes:
        transfers: sends the results to all stages, of all CFG branches.
        votes: the pipeline's votes, through which a stage's error reaches the others.
        on_step: called with the number of transformer calls of each step, or of each part of a step if the stages wait.
        overlaps: True if the steps of the current pipeline call may overlap.
        waits: number of times that all stages have waited for each other.
        steps: the steps with results that are not complete on all stages.
        count: number of results since the pipeline is parallel.
        started: their number when the current step began. complete: their number that are complete.
        labels: the pieces of the results that lazy tensors depend on.
    """

    transfers: ResultTransfers
    votes: Votes
    on_step: Callable[[int], None] = lambda calls: None
    overlaps: bool = False
    waits: int = 0
    steps: list[_Step] = field(default_factory=lambda: [_Step()])
    count: int = 0
    started: int = 0
    complete: int = 0
    labels: PieceLabels = field(default_factory=PieceLabels)
    _stages: list[BlockStage] = field(default_factory=list)
    _unread: list[Pending] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.votes.has_pending = self.is_waiting
        self.votes.progress = lambda: self.count

    @override
    def is_waiting(self) -> bool:
        return any(step.results for step in self.steps)

    @override
    def is_computed(self, lazy: Sequence[LazyTensor]) -> bool:
        return all(x.after <= self.complete for x in lazy)

    @override
    def can_defer(self, function: Any, lazy: Sequence[LazyTensor]) -> bool:
        return is_functional(function) and (torch.Tag.pointwise in function.tags or function.overloadpacket in CARRIERS)

    @override
    def defer(self, buffer: Tensor, function: partial[Tensor]) -> None:
        self.steps[-1].later.append((buffer, function))
        if self.overlaps:
            self.labels.carry(buffer, function)

    @override
    def flush(self) -> None:
        if self.is_waiting():
            self._wait()

    def begin(self, stage: BlockStage, key: Hashable, forwards: int, owner: int) -> CallResult:
        """Begin a transformer call of so many forwards, which the branch `owner` computes. Ranks: all stages."""
        if stage not in self._stages:
            self._stages.append(stage)
        result = self.transfers.begin(stage, key, forwards, owner, in_pieces=self.overlaps)
        self.steps[-1].results.append(result)
        self.count += 1
        return result

    def finish(self, result: CallResult, output: Any, samples: Sequence[int] | None) -> Any:
        """Return the result of a transformer call as lazy tensors. Ranks: all stages.

        Args: output, samples: see `ResultTransfers.finish`.
        Raises: the error of this stage. CallFailedError: another stage has failed.
        """
        form = self.transfers.finish(result, output, samples)
        if form is None:
            self._raise_error()
        for i, x in enumerate(result.tensors):
            self.labels.put(x, None if result.pieces is None else result.pieces.numbers[i])
        return form.filled([LazyTensor(x, self, self.count) for x in result.tensors])

    def receive(
        self, stage: BlockStage, key: Hashable, forwards: int, owner: int, samples: Sequence[int] | None
    ) -> Any:
        """Return the result of a transformer call that another branch computes, as lazy tensors."""
        result = self.begin(stage, key, forwards, owner)
        for number in range(forwards):
            self.transfers.put(result, number, None, is_whole=samples is None)
        return self.finish(result, None, samples)

    def enter(self, stage: BlockStage, key: Hashable, values: Any, *, overlaps: bool) -> None:
        """Wait for the results that a transformer call depends on, unless this step can overlap with the step before.

        Args:
            key: identifies the shapes of the arguments.
            values: the arguments, a nest with lazy tensors.
            overlaps: False: the model mixes pieces before its blocks.
        Ranks: all stages.
        """
        lazy = list(of_type(LazyTensor, values))
        after = max((x.after for x in lazy), default=0)
        if after <= self.complete:
            return
        is_new_step, pieces = after > self.started, self.transfers.pieces_of(stage, key)
        results = self.steps[-1 if is_new_step else -2].results
        if not (
            self.overlaps
            and overlaps
            and pieces is not None
            and all(x.forwards == len(pieces.positions) for x in results)
            and self.labels.are_within([x.buffer for x in lazy], pieces.numbers)
        ):
            self.flush()
        elif is_new_step:
            self._begin_step(len(pieces.positions))

    def prepare(self, number: int) -> bool:
        """On the first stage: wait for a piece of the step before, and compute what the next forward needs of it.

        Returns: False if another stage has failed.
        """
        if len(self.steps) < 2 or not self.transfers.is_first:
            return True
        before, current = self.steps[-2:]
        is_new = False
        for result in before.results:
            is_new |= self.transfers.take(result, number + 1)
        if is_new:
            compute(before.later)
        if is_new or not number:
            compute(current.later)
        return not any(x.failed for x in before.results)

    def start(self, *, overlaps: bool) -> None:
        """Start a call of the pipeline. Ranks: all stages."""
        self.reset()
        self.transfers.forget_oldest()
        for pending in self._unread:  # of a call that failed on all stages
            pending.wait()
        self._unread, self.overlaps = [], overlaps

    def reset(self) -> None:
        """Forget the results of a call of the pipeline, also if it failed."""
        for result in (x for step in self.steps for x in step.results):
            self._unread += [*(pending for _, pending in result.incoming), *result.outgoing]
        self.transfers.reset()
        self._stages, self.steps, self.labels = [], [_Step()], PieceLabels()
        self.started = self.complete = self.count

    def _begin_step(self, pieces: int) -> None:
        """Begin a step while the results of the step before arrive, and complete those of the step before that."""
        if len(self.steps) > 1:
            self._complete([self.steps.pop(0)])
            compute(self.steps[0].later)  # some may depend on this step only
            for stage in self._stages:
                stage.links.finish(newest=2 * pieces)
        calls = len(self.steps[-1].results)
        self.steps.append(_Step())
        self.started = self.count
        self.on_step(calls)

    def _wait(self) -> None:
        """Complete all results. Ranks: all stages."""
        self.votes.check()
        self._complete(self.steps)
        for stage in self._stages:
            stage.links.finish()
        calls = len(self.steps[-1].results)
        self._stages, self.steps, self.labels = [], [_Step()], PieceLabels()
        self.started = self.complete = self.count
        self.waits += 1
        self.votes.end_exchanges()
        self.on_step(calls)

    def _complete(self, steps: Sequence[_Step]) -> None:
        """Complete the results of some steps, and compute what was deferred.

        Raises: the error of this stage. CallFailedError: another stage has failed.
        """
        results = [x for step in steps for x in step.results]
        for result in results:
            self.transfers.take(result)
            for pending in result.outgoing:
                pending.wait()
        if any(x.failed for x in results):
            self._raise_error()
        for step in steps:
            compute(step.later)
            self.labels.forget(buffer for buffer, _ in step.later)
        self.labels.forget(x for result in results for x in result.tensors)
        self.complete += len(results)

    def _raise_error(self) -> NoReturn:
        """Raise the error of this stage, or a CallFailedError if another stage has failed."""
        for stage in self._stages:
            if stage.error is not None and not stage.error_of_others:
                raise stage.error
        self.votes.check()  # raises the error of the other stage by name, inside a call of the pipeline
        raise CallFailedError("another stage of blocks has failed in this transformer call")
