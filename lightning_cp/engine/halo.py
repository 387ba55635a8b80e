"""Convolutions over sharded rows: exchange a halo before, and drop the halo's rows from the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_cp.comm.halo import halo_exchange, halo_ranges
from lightning_cp.engine.hook_base import EngineHook
from lightning_cp.engine.rules import Halo
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

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        call, rule = self.session.current(), self.rule
        sizes, x = list(call.row_lengths(rule.modality)), args[0]
        if not isinstance(x, Tensor) or x.shape[rule.dim] != sizes[call.groups.context_rank]:
            raise PlanError(f"{rule.path} got {tuple(x.shape)}, not this rank's rows {sizes} in dim {rule.dim}")
        return halo_exchange(x, rule.dim, sizes, rule.reach, call.groups.name), *args[1:]

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        call, rule = self.session.current(), self.rule
        sizes, rank = list(call.row_lengths(rule.modality)), call.groups.context_rank
        before = sum(sizes[:rank]) - halo_ranges(sizes, rule.reach)[rank][0]
        return output.narrow(rule.dim, before, sizes[rank])
