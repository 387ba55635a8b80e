"""Convolutions over rows that several ranks hold: each sees its neighbours' rows, and keeps its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_cp.comm.halo import halo_exchange, margins
from lightning_cp.engine.hook_base import EngineHook
from lightning_cp.engine.rules import Halo
from lightning_cp.engine.session import Session
from lightning_cp.errors import PlanError


@dataclass(eq=False)
class HaloHook(EngineHook):
    """Around a convolution: its zeros stay where the sequence ends, and rows of neighbours come where it goes on.

    Gradient: exact; that of neighbours' rows goes back to them. Ranks: all of the context group.
    """

    session: Session
    rule: Halo

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        call, rule = self.session.current(), self.rule
        sizes, x = list(call.row_lengths(rule.stream)), args[0]
        if not isinstance(x, Tensor) or x.shape[rule.dim] != sizes[call.groups.context_rank]:
            raise PlanError(f"{rule.path} got {tuple(x.shape)}, not this rank's rows {sizes} in dim {rule.dim}")
        return halo_exchange(x, rule.dim, sizes, rule.reach, call.groups.name), *args[1:]

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        call, rule = self.session.current(), self.rule
        sizes, rank = list(call.row_lengths(rule.stream)), call.groups.context_rank
        before = sum(sizes[:rank]) - margins(sizes, rule.reach)[rank][0]
        return output.narrow(rule.dim, before, sizes[rank])
