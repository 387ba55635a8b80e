"""Convolutions over sharded rows: exchange a halo before, and drop the halo's rows from the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.comm.halo import halo_exchange
from lightning_cp.comm.shards import gather
from lightning_cp.comm.to_device import numbers_on
from lightning_cp.engine.hook_base import EngineHook
from lightning_cp.engine.patches import Evaluation
from lightning_cp.engine.rules import Halo
from lightning_cp.engine.session import Session
from lightning_cp.errors import PlanError


@dataclass(eq=False)
class HaloHook(EngineHook):
    """Hook around a convolution: adds a halo of the neighbouring ranks' rows to its input.

    The convolution's zero padding takes effect only at the two ends of the sequence. For a model that is computed in
    patches, rows of other patches come from a buffer of the rows on both sides of each border between two patches.

    Gradient: exact; gradients of halo rows are sent back to the rows' ranks. Ranks: all of the context group.
    """

    session: Session
    rule: Halo

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        call, rule = self.session.current(), self.rule
        (_, *sizes, _), x = call.row_parts(rule.modality), args[0]
        if not isinstance(x, Tensor) or x.shape[rule.dim] != sizes[call.groups.context_rank]:
            raise PlanError(f"{rule.path} got {tuple(x.shape)}, not this rank's rows {sizes} in dim {rule.dim}")
        extended = halo_exchange(x, rule.dim, sizes, rule.reach, call.groups.name)
        if call.evaluation is not None:
            extended = self._extend_patch(x, extended, call.evaluation)
        return (extended, *args[1:]), kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        own = self._rows()[self.session.current().groups.context_rank]
        return output.narrow(self.rule.dim, min(self.rule.reach, own.start) if own else 0, len(own))

    def _rows(self) -> list[range]:
        """Return the rows of each rank in the whole sequence."""
        call, found = self.session.current(), []
        start, *sizes, _ = call.row_parts(self.rule.modality)
        for size in sizes:
            found.append(range(start, start + size))
            start += size
        return found

    def _extend_patch(self, x: Tensor, extended: Tensor, evaluation: Evaluation) -> Tensor:
        """Put the rows at borders into the buffer, and add those of other patches.

        Args: x: this rank's rows. extended: with those of other ranks of the patch.
        """
        call, dim, reach = self.session.current(), self.rule.dim, self.rule.reach
        total, ranks = call.rows[self.rule.modality], self._rows()
        borders = [patch.start for patch in evaluation.each_patch(total)[1:]]
        kept = sorted({row for border in borders for row in range(border - reach, border + reach)} & {*range(total)})
        by_rank = [[row for row in kept if row in own] for own in ranks]
        own, patch = ranks[call.groups.context_rank], range(ranks[0].start, ranks[-1].stop)

        def select(tensor: Tensor, rows: list[int]) -> Tensor:
            return tensor.index_select(dim, numbers_on(tensor.device, rows, torch.int64))

        mine = select(x, [row - own.start for row in by_rank[call.groups.context_rank]])
        new = gather(mine, dim, [len(rows) for rows in by_rank], call.groups.name)
        buffer = evaluation.next_buffer()
        if evaluation.patch is None:
            buffer.tensors = [new]
            return extended
        (rows,) = buffer.tensors
        positions = [kept.index(row) for rank in by_rank for row in rank]
        rows.index_copy_(dim, numbers_on(rows.device, positions, torch.int64), new)
        before = [kept.index(row) for row in range(max(0, own.start - reach), patch.start)]
        after = [kept.index(row) for row in range(patch.stop, min(total, own.stop + reach))]
        return torch.cat([select(rows, before), extended, select(rows, after)], dim)
