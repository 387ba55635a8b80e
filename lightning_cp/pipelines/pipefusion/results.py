"""Results of the last stage for all other ranks: lazy tensors, so that no stage waits for the others between steps.

The operators of guidance and of the scheduler are deferred until something reads a value. If each patch (or
micro-batch) of a step depends on the same one of the step before, the first stage computes a patch when this piece of
the results has arrived. The other stages do not need the latents: they get the outputs of the stage before. They
complete the results of a step two steps later.

Labels tell which pieces a step needs. The label of an element is the number of the last piece of the results that it
depends on, and 0 if it depends on none. Deferred operators carry labels from the results to the arguments of the next
transformer call. All ranks run the same operators, so they decide the same without an exchange. Between the arguments
and the blocks, the plan of the class says whether pieces are mixed (`Patches.overlaps`).

With CFG parallelism, the ranks of a branch get the results of the other branches in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, NoReturn

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cp.comm.transfer import Pending
from lightning_cp.compat.torch_names import aten, is_functional
from lightning_cp.errors import CallFailedError
from lightning_cp.nest import of_type, replace
from lightning_cp.pipelines.error_votes import Votes
from lightning_cp.pipelines.lazy_tensor import Deferred, LazyResults, LazyTensor, compute
from lightning_cp.pipelines.pipefusion.stages import BlockStage
from lightning_cp.pipelines.pipefusion.transfers import CallResult, ResultTransfers

_aten = torch.ops.aten
_MOVES = (_aten.clone, _aten.repeat, _aten.cat, _aten.stack)
_REDUCTIONS = (_aten.sum, _aten.mean, _aten.std, _aten.var, _aten.amax, _aten.amin, _aten.linalg_vector_norm)
# Operators besides elementwise ones that schedulers and guidance use. (einsum is a bmm.) Modules use others, and wait.
CARRIERS = frozenset((aten("_to_copy"), _aten.bmm, *_MOVES, *_REDUCTIONS))
_NO_PIECE = torch.iinfo(torch.int16).max


@dataclass(eq=False)
class PieceLabels:
    """The labels of all tensors that depend on results that have not arrived.

    Attributes: by_storage: for the address of a storage, the label of each of its elements, int16 on the host.
    """

    by_storage: dict[int, Tensor] = field(default_factory=dict)

    def of(self, x: Tensor) -> Tensor:
        """Return the labels of a tensor's elements, with its shape."""
        storage = x.untyped_storage()
        labels = self.by_storage.get(storage.data_ptr())
        if labels is None:
            return torch.zeros((), dtype=torch.int16).expand(x.shape)
        if len(labels) * x.element_size() != storage.nbytes():  # a view of another dtype
            return torch.full((), _NO_PIECE, dtype=torch.int16).expand(x.shape)
        return labels.as_strided(x.shape, x.stride(), x.storage_offset())

    def put(self, x: Tensor, labels: Tensor | None) -> None:
        """Set the labels of a tensor's elements. Args: labels: None: they arrive in no pieces."""
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.by_storage:
            self.by_storage[storage.data_ptr()] = torch.zeros(storage.nbytes() // x.element_size(), dtype=torch.int16)
        self.of(x).copy_(torch.tensor(_NO_PIECE) if labels is None else labels)

    def carry(self, buffer: Tensor, function: partial[Tensor]) -> None:
        """Set the labels of an operator's result. Args: function: one of `CARRIERS`, or an elementwise operator."""
        self.put(buffer, _carried(function, buffer.shape, self.of))

    def forget(self, computed: Iterable[Tensor]) -> None:
        """Forget the labels of tensors that have their values."""
        for x in computed:
            self.by_storage.pop(x.untyped_storage().data_ptr(), None)

    def are_within(self, arguments: Sequence[Tensor], pieces: Sequence[Tensor]) -> bool:
        """Return True if each piece of a transformer call needs the same and earlier pieces of the results only.

        Args:
            arguments: tensors that the call gets.
            pieces: for each tensor of its result, the number of the piece of each element. If there is one, it is for
                all arguments.
        """
        if len(pieces) == 1:
            pieces = [*pieces] * len(arguments)
        return len(pieces) == len(arguments) and all(
            _are_at_most(self.of(x), of_result) for x, of_result in zip(arguments, pieces, strict=True)
        )


def _are_at_most(labels: Tensor, pieces: Tensor) -> bool:
    """Compare at equal positions; along a dim of other size (channels), the largest with the smallest."""
    if labels.ndim != pieces.ndim:
        return False
    for dim, (size, of_result) in enumerate(zip(labels.shape, pieces.shape, strict=True)):
        if size != of_result:
            labels, pieces = labels.amax(dim, keepdim=True), pieces.amin(dim, keepdim=True)
    return bool((labels <= pieces).all())


def _carried(function: partial[Tensor], shape: Sequence[int], labels_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the labels of an operator's result of this shape, or labels that broadcast to it."""
    packet = function.func.overloadpacket  # type: ignore[attr-defined]
    args, kwargs = replace(Tensor, labels_of, (function.args, function.keywords))
    labels = list(of_type(Tensor, (args, kwargs)))
    if packet in _MOVES:
        return function.func(*args, **kwargs)
    if packet is _aten.bmm:
        left, right = labels
        return torch.maximum(left.amax(2, keepdim=True), right.amax(1, keepdim=True))
    if packet in _REDUCTIONS:
        (reduced,) = labels
        if reduced.ndim != len(shape):
            return reduced.amax()
        dims = [dim for dim, size in enumerate(shape) if size != reduced.shape[dim]]
        return reduced.amax(dims, keepdim=True) if dims else reduced
    return reduce(torch.maximum, labels)


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
            and all(x.pieces is not None and x.forwards == len(pieces.positions) for x in results)
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
