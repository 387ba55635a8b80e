"""Evaluate a model in patches of its tokens: the state of one evaluation, which is a forward for each patch.

The first evaluations compute the whole sequence and fill the key buffers. Later evaluations run one forward for each
patch, in order. A patch attends to the new keys of itself and of earlier patches, and to the keys of later patches from
the previous evaluation. So the result depends on the number of patches and of whole evaluations only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_cp.attention.call import Settings
from lightning_cp.comm.background import numbers_on
from lightning_cp.comm.halo import sum_over_ranks
from lightning_cp.comm.shards import gather_shards, shard_range
from lightning_cp.engine.attention.masks import gather_token_mask, outer_mask, token_mask
from lightning_cp.engine.evaluation import Evaluation
from lightning_cp.engine.installed import Installed
from lightning_cp.engine.paths import expand, submodule
from lightning_cp.engine.session import Session
from lightning_cp.engine.sharding.lengths import Sizes
from lightning_cp.errors import InterceptionError, PlanError, ShapeError
from lightning_cp.pipelines.pipefusion.key_buffers import Buffer, KeyBuffer, attend_buffered
from lightning_cp.plans import Attention, Modalities
from lightning_cp.undoable import Undo, intercept_calls


@dataclass(eq=False)
class PatchEvaluation(Evaluation):
    """One evaluation of a model: a forward on the whole sequence, or one forward for each patch.

    Attributes:
        patches: number of patches.
        order: order of the modalities' tokens in attention.
        buffers: tokens of other patches that the calls of a forward keep between evaluations, in call order.
        patch: index of the current forward's patch; None: the forward computes the whole sequence.
        outputs: outputs gathered so far, over the whole sequence.
        kept: results that are the same for all patches, by module and number of its call in a forward.
    """

    session: Session
    patches: int
    order: Modalities
    buffers: list[Buffer] = field(default_factory=list)
    patch: int | None = None
    outputs: list[Tensor] = field(default_factory=list)
    kept: dict[tuple[str, int], Any] = field(default_factory=dict)
    _run_once: Counter[str] = field(default_factory=Counter)
    _calls: int = 0
    _gathered: int = 0

    @classmethod
    def of(cls, session: Session, patches: int) -> PatchEvaluation:
        """Return an evaluation with empty buffers."""
        assert session.model_plan.patches is not None, "parallelize_pipeline refuses other classes"
        return cls(session, patches, session.model_plan.patches.order)

    def begin(self, patch: int | None) -> None:
        """Begin the forward of a patch, or of the whole sequence (None)."""
        self.patch, self._calls, self._gathered, self._run_once = patch, 0, 0, Counter()
        if not patch:
            self.end()

    def end(self) -> None:
        """Free the outputs and results that are kept for the patches of one evaluation only."""
        self.outputs, self.kept = [], {}

    @override
    def tokens(self, length: int) -> range:
        return range(length) if self.patch is None else shard_range(length, self.patches, self.patch)

    def _each_patch(self, length: int) -> list[range]:
        """Return the positions of all patches in a sequence of `length` tokens."""
        return [shard_range(length, self.patches, patch) for patch in range(self.patches)]

    def next_buffer(self, new: type[Buffer] = Buffer) -> Buffer:
        """Return the buffer of the next call of this forward that has one. Args: new: its class."""
        if self._calls == len(self.buffers):
            self.buffers.append(new())
        self._calls += 1
        return self.buffers[self._calls - 1]

    def next_keys(self) -> KeyBuffer:
        """Return the buffer of the next attention call of this forward."""
        buffer = self.next_buffer(KeyBuffer)
        assert isinstance(buffer, KeyBuffer), "all forwards of a model make the same calls"
        return buffer

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the result of a module's call, which is the same in the forwards of all patches."""
        key = (name, self._run_once[name])
        self._run_once[name] += 1
        if self.patch is None:
            return compute()
        if key not in self.kept:
            patch, self.patch = self.patch, None  # the module gets whole tensors
            try:
                self.kept[key] = compute()
            finally:
                self.patch = patch
        return self.kept[key]

    @override
    def check_order(self, modalities: Modalities, name: str) -> None:
        if [x for x in self.order if x in modalities] != list(modalities):
            raise PlanError(f"{name} holds {modalities}, but the order of tokens in attention is {self.order}")

    @override
    def put_output(self, x: Tensor, dim: int, segments: Sequence[tuple[int, int, int]]) -> Tensor:
        """Put a patch's output into the output of the whole sequence, and return a copy. What is not known yet is NaN.

        Args:
            x: output of this patch on all ranks.
            dim: dim of the tokens.
            segments: for each segment along `dim`, the number of tokens of the patch, before it and after it.
        """
        if self.patch is None:
            return x
        shape = list(x.shape)
        shape[dim] = sum(map(sum, segments))
        if self._gathered == len(self.outputs):
            self.outputs.append(x.new_full(shape, torch.nan) if x.is_floating_point() else x.new_zeros(shape))
        whole, source, target = self.outputs[self._gathered], 0, 0
        self._gathered += 1
        for length, before, after in segments:
            whole.narrow(dim, target + before, length).copy_(x.narrow(dim, source, length))
            source, target = source + length, target + before + length + after
        return whole.clone()

    @override
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        kind: Attention | None,
        *,
        sizes: Sizes,
        settings: Settings,
    ) -> Tensor:
        """Compute one attention call, and put its keys into the next buffer."""
        if torch.compiler.is_compiling():
            raise InterceptionError(
                "a model that is computed in patches cannot be compiled: do not compile it, or its blocks"
            )
        if settings.causal or kind is None or kind.form != "softmax":
            raise InterceptionError(
                "causal, block-causal or ragged attention cannot be computed in patches: use patches=1"
            )
        call, attended = self.session.current(), kind.queries if kind.keys is None else kind.keys
        modalities = tuple(modality for modality in self.order if modality in attended)
        ranges, total = call.ranges(modalities), sum(call.lengths.get(modality, 0) for modality in modalities)
        if mask is not None and kind.mask == "keys":
            mask = mask[..., :1, :]
        elif mask is not None and kind.mask == "padded":
            mask = mask[..., :total]
        elif mask is not None and kind.mask == "outer":
            local_mask = token_mask(mask)
            new = gather_token_mask(local_mask, sizes[1], call.groups)
            buffer = self.next_keys()
            buffer.put([new.unsqueeze(-1)], [x for rank in ranges for x in rank], total)
            mask = outer_mask(local_mask, buffer.tensors[0].squeeze(-1))
        return attend_buffered(
            query,
            key,
            value,
            mask,
            buffer=self.next_keys(),
            ranges=ranges,
            total=total,
            q_lengths=sizes[0],
            settings=settings,
        )

    @override
    def sum_over_patches(
        self, modalities: Modalities, tensors: Sequence[Tensor], sums: Callable[..., Tensor]
    ) -> Tensor:
        """Keep the sums of each patch in the next buffer, and add them."""
        buffer, name = self.next_buffer(), self.session.current().groups.name
        if self.patch is None:
            split = [torch.split(x, self._lengths_in_patches(modalities), 1) for x in tensors]
            buffer.tensors = [sum_over_ranks(torch.stack([sums(*x) for x in zip(*split, strict=True)]), name)]
        elif not buffer.tensors:
            raise ShapeError("a patch was computed before the whole sequence, so the sums of other patches are missing")
        else:
            buffer.tensors[0][self.patch] = sum_over_ranks(sums(*tensors), name)
        return buffer.tensors[0].sum(0)

    def _lengths_in_patches(self, modalities: Modalities) -> list[int]:
        """Return the number of this rank's tokens in each patch. Args: modalities: one modality."""
        call = self.session.current()
        (modality,), ((local_tokens,), *_) = modalities, call.ranges(modalities)[call.groups.context_rank :]
        tokens, rows = call.row_tokens(modality), call.rows.get(modality) or call.lengths[modality]
        patches = [range(x.start * tokens, x.stop * tokens) for x in self._each_patch(rows)]
        return [max(0, min(local_tokens.stop, x.stop) - max(local_tokens.start, x.start)) for x in patches]

    @override
    def extend_rows(
        self, x: Tensor, extended: Tensor, *, dim: int, reach: int, by_rank: Sequence[range], total: int
    ) -> Tensor:
        """Put the rows at borders of patches into the next buffer, and add those of other patches."""
        groups, borders = self.session.current().groups, [patch.start for patch in self._each_patch(total)[1:]]
        kept = sorted({row for border in borders for row in range(border - reach, border + reach)} & {*range(total)})
        kept_by_rank = [[row for row in kept if row in local_rows] for local_rows in by_rank]
        local_rows, patch = by_rank[groups.context_rank], range(by_rank[0].start, by_rank[-1].stop)

        def select(tensor: Tensor, rows: list[int]) -> Tensor:
            return tensor.index_select(dim, numbers_on(tensor.device, rows, torch.int64))

        mine = select(x, [row - local_rows.start for row in kept_by_rank[groups.context_rank]])
        new = gather_shards(mine, dim, [len(rows) for rows in kept_by_rank], groups.name)
        buffer = self.next_buffer()
        if self.patch is None:
            buffer.tensors = [new]
            return extended
        (rows,) = buffer.tensors
        positions = [kept.index(row) for rank in kept_by_rank for row in rank]
        rows.index_copy_(dim, numbers_on(rows.device, positions, torch.int64), new)
        before = [kept.index(row) for row in range(max(0, local_rows.start - reach), patch.start)]
        after = [kept.index(row) for row in range(patch.stop, min(total, local_rows.stop + reach))]
        return torch.cat([select(rows, before), extended, select(rows, after)], dim)


def current_evaluation(session: Session) -> PatchEvaluation | None:
    """Return the evaluation that the current forward belongs to; None if it is not computed in patches."""
    evaluation = session.evaluation
    assert evaluation is None or isinstance(evaluation, PatchEvaluation), "there is no other one"
    return evaluation


def run_once(installed: Installed) -> list[Undo]:
    """Compute the modules in `Patches.once` for the first patch only. Returns: functions to undo it."""
    plan, module = installed.model_plan.patches, installed.module
    return [
        intercept_calls(submodule(module, path), partial(_once, installed.session, path))
        for pattern in (plan.once if plan is not None else ())
        for path in _paths(installed, pattern)
    ]


def _paths(installed: Installed, pattern: str) -> list[str]:
    try:
        return expand(installed.module, pattern)
    except PlanError:  # a part that this configuration does not have
        return []


def _once(session: Session, path: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    evaluation, compute = current_evaluation(session), partial(call, *args, **kwargs)
    return compute() if evaluation is None else evaluation.once(path, compute)
