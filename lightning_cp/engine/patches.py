"""Evaluate a model in patches of its tokens: the state of one evaluation, which is a forward for each patch.

The first evaluations compute the whole sequence and fill the key buffers. Later evaluations run one forward for each
patch, in order. A patch attends to the new keys of itself and of earlier patches, and to the keys of later patches from
the previous evaluation. So the result depends on the number of patches and of whole evaluations only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_cp.attention.buffered import Buffer, KeyBuffer
from lightning_cp.comm.shards import shard_range
from lightning_cp.errors import PlanError
from lightning_cp.plans import Modalities


@dataclass(eq=False)
class Evaluation:
    """One evaluation of a model: a forward on the whole sequence, or one forward for each patch.

    Attributes:
        patches: number of patches.
        order: order of the modalities' tokens in attention.
        buffers: what each call of a forward that needs other patches' tokens keeps between evaluations, in call order.
        patch: index of the current forward's patch; None: the forward computes the whole sequence.
        outputs: outputs gathered so far, over the whole sequence.
        kept: results that are the same for all patches, by module and number of its call in a forward.
    """

    patches: int
    order: Modalities
    buffers: list[Buffer] = field(default_factory=list)
    patch: int | None = None
    outputs: list[Tensor] = field(default_factory=list)
    kept: dict[tuple[str, int], Any] = field(default_factory=dict)
    _run_once: Counter[str] = field(default_factory=Counter)
    _calls: int = 0
    _gathered: int = 0

    def begin(self, patch: int | None) -> None:
        """Begin the forward of a patch, or of the whole sequence (None)."""
        self.patch, self._calls, self._gathered, self._run_once = patch, 0, 0, Counter()
        if not patch:
            self.end()

    def end(self) -> None:
        """Free the outputs and results that are kept for the patches of one evaluation only."""
        self.outputs, self.kept = [], {}

    def tokens(self, length: int) -> range:
        """Return the positions of the current patch in a sequence of `length` tokens."""
        return range(length) if self.patch is None else shard_range(length, self.patches, self.patch)

    def each_patch(self, length: int) -> list[range]:
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
            self.kept[key] = compute()
        return self.kept[key]

    def check_order(self, modalities: Modalities, name: str) -> None:
        """Raises: PlanError: the modalities of `name` are not in the order of attention."""
        if [x for x in self.order if x in modalities] != list(modalities):
            raise PlanError(f"{name} holds {modalities}, but the order of tokens in attention is {self.order}")

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
