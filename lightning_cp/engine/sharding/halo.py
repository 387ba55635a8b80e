"""Convolutions over sharded rows: exchange a halo before, and drop the halo's rows from the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_cp.comm.halo import halo_exchange
from lightning_cp.engine.hook_base import EngineHook
from lightning_cp.engine.rules.rules import Halo
from lightning_cp.engine.session import Session
from lightning_cp.errors import PlanError


@dataclass(eq=False)
class HaloHook(EngineHook):
    """Hook around a convolution: adds a halo of the neighbouring ranks' rows to its input.

    The convolution's zero padding takes effect only at the two ends of the sequence.

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
            extended = call.evaluation.extend_rows(
                x, extended, dim=rule.dim, reach=rule.reach, by_rank=self._rows(), total=call.rows[rule.modality]
            )
        return (extended, *args[1:]), kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        rows = self._rows()[self.session.current().groups.context_rank]
        return output.narrow(self.rule.dim, min(self.rule.reach, rows.start) if rows else 0, len(rows))

    def _rows(self) -> list[range]:
        call, rows = self.session.current(), []
        start, *sizes, _ = call.row_parts(self.rule.modality)
        for size in sizes:
            rows.append(range(start, start + size))
            start += size
        return rows
