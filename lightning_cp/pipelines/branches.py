"""Classifier-free guidance (CFG) parallelism: ranks on the `cfg` axis compute different branches of guidance.

Pipelines compute the branches in one of two ways, recognised from the transformer's arguments. Some repeat the latents
along the batch and call the transformer once: the batch is split. Others call it once per branch: the calls are
assigned to the branches round-robin and return a `LazyTensor` (`lazy_tensor.py`). Both give the same numbers as one
process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.comm.transforms import refuse_tangents
from lightning_cp.errors import GuidanceError
from lightning_cp.mesh import Branches
from lightning_cp.nest import of_type
from lightning_cp.pipelines.cfg_samples import cfg_merge, cfg_split, is_repeated
from lightning_cp.pipelines.forms import Form, key_of, taken_apart
from lightning_cp.pipelines.lazy_tensor import PendingGathers, resolve_all

_MAX_INCOMPLETE_EXCHANGES = 2


@dataclass(eq=False)
class BranchCalls:
    """Distributes the calls of a pipeline's transformers over the CFG branches.

    Attributes:
        name: class name of the pipeline, for errors.
        branches: CFG, context and data groups of this rank.
        pending: results that other branches compute and that are not gathered yet.
        forms: form of the result by (module, shapes of arguments, autocast). All ranks compute the first call of each.
        incomplete_exchanges: number of consecutive exchanges with fewer calls than branches.
        shared: number of calls that were distributed over branches.
        is_active: True during a call of the pipeline.
        may_start_late: True if guidance may start after the first step.
    """

    name: str
    branches: Branches
    pending: PendingGathers = field(init=False)
    forms: dict[Any, Form] = field(default_factory=dict)
    incomplete_exchanges: int = 0
    shared: int = 0
    is_active: bool = False
    may_start_late: bool = False

    def __post_init__(self) -> None:
        self.pending = PendingGathers(self.branches, self._count_exchange)

    def call(
        self, module: nn.Module, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one transformer call, split or assigned to one branch. Ranks: all branches, with equal arguments."""
        if torch.is_grad_enabled() and any(x.requires_grad for x in [*module.parameters(), *_tensors((args, kwargs))]):
            raise GuidanceError(
                f"cfg={self.branches.cfg} is for sampling only, but {type(module).__name__} is called with gradients "
                "enabled: use torch.no_grad(), or cfg=1"
            )
        refuse_tangents(f"a pipeline with cfg={self.branches.cfg}", *_tensors((args, kwargs)))
        args, kwargs = resolve_all((args, kwargs))
        main = _main_argument(module, args, kwargs)
        if not is_repeated(main):
            return self._assign_to_branch(module, compute, args, kwargs)
        if len(main) < self.branches.cfg:
            raise self._too_many(len(main))
        self.shared += 1
        own_args, own_kwargs = cfg_split((args, kwargs), self.branches, like=main)
        return cfg_merge(compute(*own_args, **own_kwargs), self.branches, like=main)

    def use(self, branches: Branches) -> None:
        """Distribute the following calls over other groups."""
        self.branches = self.pending.branches = branches

    def begin(self, *, may_start_late: bool = False) -> None:
        """Reset the counters before a call of the pipeline."""
        self.incomplete_exchanges = self.shared = 0
        self.is_active, self.may_start_late = True, may_start_late

    def end(self) -> None:
        """Drop pending results after a call of the pipeline, also if it raised."""
        self.pending.drop()
        self.is_active = False

    def _assign_to_branch(
        self, module: nn.Module, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        key = (id(module), key_of((args, kwargs)))
        form, turn = self.forms.get(key), len(self.pending.results) % self.branches.cfg
        if form is not None and turn != self.branches.cfg_rank:
            return form.filled(self.pending.lazy_tensors(form.empty(), turn))
        found, tensors = taken_apart(compute(*args, **kwargs))
        if form is None:
            form = self.forms[key] = found
            return form.filled(self.pending.lazy_tensors(tensors, None))
        assert found.layout == form.layout, "arguments of equal shapes give results of equal shapes"
        return form.filled(self.pending.lazy_tensors(tensors, turn))

    def _count_exchange(self, calls: int) -> None:
        if calls >= self.branches.cfg:
            self.shared += calls
        self.incomplete_exchanges = 0 if calls >= self.branches.cfg else self.incomplete_exchanges + 1
        if not self.shared and not self.may_start_late and self.incomplete_exchanges == _MAX_INCOMPLETE_EXCHANGES:
            raise self._too_many(calls)

    def _too_many(self, found: int) -> GuidanceError:
        cfg = self.branches.cfg
        if found > 1:
            return GuidanceError(f"cfg={cfg}, but {self.name} computes {found} branches of guidance: use cfg={found}")
        return GuidanceError(
            f"cfg={cfg}, but {self.name} computes one branch at a time: guidance is off (guidance_scale=1, or no "
            "negative prompt where one is needed), is built into the model, or needs one branch to compute the "
            "next. Use cfg=1, and use the ranks for ring or ulysses"
        )


def guidance_may_start_late(pipe: Any, arguments: Mapping[str, Any]) -> bool:
    """Return True if guidance may start after the first step, because of the guider or of a start argument."""
    begins = [value for name, value in arguments.items() if "start" in name and ("cfg" in name or "guidance" in name)]
    begins.append(getattr(getattr(pipe, "guider", None), "_start", 0))
    return any(isinstance(value, (int, float)) and value > 0 for value in begins)


def _main_argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the latents: the first argument of the transformer's forward."""
    if args:
        return args[0]
    return kwargs.get(list(inspect.signature(type(module).forward).parameters)[1])


def _tensors(values: Any) -> list[Tensor]:
    return list(of_type(Tensor, values))
