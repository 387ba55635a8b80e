"""Compare which module runs next between ranks: all ranks must run it together, to all-gather its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_cp.comm.agree import raise_on_all
from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.engine.apply import Installed
from lightning_cp.engine.paths import class_of
from lightning_cp.errors import PeerMismatchError
from lightning_cp.mesh.sample_groups import world_control
from lightning_cp.strategies.gradients import sharded_units

_BACKWARD = 0
_REMEDY = (
    "Weights are sharded, so all data groups must run the same modules in the same order: choose the module (an "
    "expert, for example) from the step or from a random number that is equal on all ranks, not from the data; or use "
    "strategy cp with find_unused_parameters=True"
)


class EqualBranches:
    """Compare the modules with sharded weights that ranks are about to run, before these weights are all-gathered.

    The exchange has a group of its own: in the group of the weights, it could pair up with an all-gather.
    """

    def __init__(self) -> None:
        self._names = ["a backward"]  # by number; set-ups run in the same order on all ranks
        self._compared: WeakSet[nn.Module] = WeakSet()
        self._group: dist.ProcessGroup | None = None
        self._world: dist.ProcessGroup | None = None

    def watch(
        self, module: nn.Module, installed: Sequence[Installed], check: Callable[[Any], None], *, every_unit: bool
    ) -> None:
        """Compare from now on the forwards of transformers, and of FSDP2 units outside of transformers.

        Args:
            check: raises a ValueError if a unit cannot gather its weights.
            every_unit: also compare units inside transformers (the blocks).
        Ranks: the whole world.
        """
        if dist.group.WORLD is not self._world or self._group is None:
            self._world, self._group = dist.group.WORLD, world_control("branches")
        transformers: set[nn.Module] = {one.module for one in installed}
        inside: set[nn.Module] = {inner for one in transformers for inner in one.modules()} - transformers
        for name, unit in module.named_modules():
            is_compared = (every_unit or unit not in inside) and isinstance(unit, FSDPModule)
            if unit in transformers:  # outer units may all-gather its weights
                is_compared = any(isinstance(x, DTensor) for x in unit.parameters())
            if is_compared and unit not in self._compared:
                self._names.append(f"{name or f'module {len(self._names)}'} ({class_of(unit).__name__})")
                self._compared.add(unit)
                before = partial(self._before_forward, len(self._names) - 1, sharded_units([unit]), check)
                unit.register_forward_pre_hook(before, prepend=True)

    def backward(self) -> None:
        """Compare before a backward. Ranks: the whole world. Raises: PeerMismatchError: see `next`."""
        self.next(_BACKWARD)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(
        self, number: int, units: Sequence[FSDPModule], check: Callable[[Any], None], *_: object
    ) -> None:
        error = None
        try:
            for unit in units:
                check(unit)
        except ValueError as found:
            error = found
        self.next(number, error)

    def next(self, number: int, error: ValueError | None = None) -> None:
        """Compare what each rank runs next. Synchronises the hosts, but not with their GPUs.

        Args: number: number of the module. error: why this rank cannot run it.
        Ranks: the whole world.
        Raises: on all ranks:
            PeerMismatchError: they run different modules, or some of them without gradients.
            ValueError, CallFailedError: a rank has an error.
        """
        if self._group is None or dist.group.WORLD is not self._world:
            return
        by_rank = all_gather_ints([number, int(torch.is_grad_enabled()), int(error is not None)], group=self._group)
        for rank, other in enumerate(by_rank):
            if other[:2] != by_rank[0][:2]:
                first, here = (self._describe(*values[:2]) for values in (by_rank[0], other))
                raise PeerMismatchError(f"rank 0 runs {first}, but rank {rank} runs {here}. {_REMEDY}")
        if any(failed for _, _, failed in by_rank):
            raise_on_all(error, "cannot gather weights", self._group)

    def _describe(self, number: int, with_gradients: int) -> str:
        return self._names[number] + ("" if with_gradients or number == _BACKWARD else " without gradients")

    @override
    def __reduce__(self) -> tuple[type[EqualBranches], tuple[()]]:
        return type(self), ()
