"""Lazy tensors for results that another rank computes: all are filled in when the first one is read.

Some pipelines call their transformer once per branch of guidance. With CFG parallelism, each rank computes the calls of
its own branch only and gets a `LazyTensor` for the calls of the others. With stages of blocks, the last stage has the
results. The rank that has a result gets a `LazyTensor` for it too, so all ranks reach the first read, and the exchange
that it needs, at the same point of the program. Operations between the calls may therefore cost speed, but never change
the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from lightning_cp.comm.packet import layout_of
from lightning_cp.comm.packets import all_gather_tensors
from lightning_cp.compat.torch_names import aten, make_wrapper_subclass
from lightning_cp.mesh import MeshGroups
from lightning_cp.nest import of_type, replace

_aten = torch.ops.aten
# Operators that pipelines apply to one branch's result before they call the next branch; deferred until the exchange.
_LATER = (aten("_to_copy"), _aten.clone, _aten.neg, _aten.mul, _aten.div, _aten.add, _aten.sub, _aten.rsub)
_JOINS = (_aten.stack, _aten.cat)  # of the samples of one branch; also deferred


@dataclass
class _Result:
    """Tensors of one call, and the rank of the group that has them (`owner`); None: every rank has them."""

    owner: int | None
    tensors: list[Tensor]


@dataclass(eq=False)
class PendingGathers:
    """Lazy tensors of a pipeline that are not exchanged yet.

    Attributes:
        groups: the ranks between which results are exchanged.
        on_flush: called after each exchange with its number of transformer calls.
        before_flush: called before each exchange.
        results: tensors of the pending calls, in call order.
        later: deferred operators, each with the tensor that takes its result.
    """

    groups: MeshGroups
    on_flush: Callable[[int], None] = lambda calls: None
    before_flush: Callable[[], None] = lambda: None
    results: list[_Result] = field(default_factory=list)
    later: list[tuple[Tensor, Callable[[], Tensor]]] = field(default_factory=list)

    def lazy_tensors(self, tensors: list[Tensor], owner: int | None) -> list[LazyTensor]:
        """Return lazy tensors for one call; `tensors` hold values if `owner` is this rank or None."""
        self.results.append(_Result(owner, tensors))
        return [LazyTensor(x, self) for x in tensors]

    def compute_later(self, function: Callable[[], Tensor], held: Tensor) -> LazyTensor:
        """Return a lazy tensor for the result of `function`, which is later copied into `held`."""
        self.later.append((held, function))
        return LazyTensor(held, self)

    def flush(self) -> None:
        """Exchange all pending results and run the deferred operators. Ranks: all of `groups`."""
        results, later = self.results, self.later
        if not results:
            return
        self.results, self.later = [], []
        self.before_flush()
        _exchange(results, self.groups)
        for held, function in later:
            held.copy_(function())
        self.on_flush(len(results))

    def drop(self) -> None:
        """Drop pending results without an exchange, at the end of a pipeline call."""
        self.results, self.later = [], []


def _exchange(results: list[_Result], groups: MeshGroups) -> None:
    by_owner = [[x for r in results if r.owner == owner for x in r.tensors] for owner in range(groups.context_size)]
    if not any(by_owner):
        return
    layouts = [layout_of(tensors) for tensors in by_owner]
    device, own = results[0].tensors[0].device, groups.context_rank
    received = all_gather_tensors(by_owner[own], layouts, device=device, group=groups.context)
    for rank, tensors in enumerate(received):
        if rank != own:
            for held, values in zip(by_owner[rank], tensors, strict=True):
                held.copy_(values)


class LazyTensor(Tensor):
    """A tensor that may not be computed yet. Its views are lazy too; the first read triggers the exchange."""

    held: Tensor
    pending: PendingGathers

    @staticmethod
    def __new__(cls, held: Tensor, pending: PendingGathers) -> LazyTensor:
        tensor: LazyTensor = make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=held.device,
        )
        tensor.held, tensor.pending = held, pending
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        lazy = list(of_type(LazyTensor, (args, kwargs)))
        pending = lazy[0].pending
        if pending.results and func.overloadpacket in _JOINS and "out" not in kwargs:
            joined = func(*replace(Tensor, _shape_only, args), **kwargs)
            held = torch.empty(joined.shape, dtype=joined.dtype, device=lazy[0].device)
            return pending.compute_later(partial(func, *replace(Tensor, _snapshot, args), **kwargs), held)
        if pending.results and len(lazy) == 1:
            if func.is_view:
                args, kwargs = _held((args, kwargs))
                return replace(Tensor, lambda x: LazyTensor(x, pending), func(*args, **kwargs))
            if func.overloadpacket in _LATER and "out" not in kwargs:
                args, kwargs = replace(Tensor, _snapshot, (args, kwargs))
                return pending.compute_later(partial(func, *args, **kwargs), _empty_result(func, args, kwargs))
        for tensor in lazy:
            tensor.pending.flush()
        args, kwargs = _held((args, kwargs))
        return func(*args, **kwargs)

    def resolved(self) -> Tensor:
        """Return the computed tensor. Ranks: all between which results are exchanged."""
        self.pending.flush()
        return self.held

    # These methods read memory without passing through the dispatcher.

    @override
    def numpy(self, *, force: bool = False) -> npt.NDArray[Any]:
        return self.resolved().numpy(force=force)

    @override
    def tolist(self) -> Any:
        return self.resolved().tolist()

    @override
    def __array__(self, *args: Any, **kwargs: Any) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = self.resolved().__array__(*args, **kwargs)  # type: ignore[no-untyped-call]
        return array

    @override
    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"LazyTensor({self.resolved()!r})"


def _held(values: Any) -> Any:
    return replace(LazyTensor, lambda x: x.held, values)


def _snapshot(x: Tensor) -> Tensor:
    """Return a lazy tensor's buffer, or a copy of another tensor: it may be changed before the operator runs."""
    return x.held if isinstance(x, LazyTensor) else x.clone()


def _shape_only(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _empty_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Allocate the result of an elementwise operator."""
    shape = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        *(x.shape for x in of_type(Tensor, (args, kwargs)))
    )
    empty_args = replace(Tensor, lambda x: x.new_empty((0,) * x.ndim) if x.ndim else x, (args, kwargs))
    empty: Tensor = func(*empty_args[0], **empty_args[1])
    return empty.new_empty(shape)


def resolve_all(values: Any) -> Any:
    """Replace the lazy tensors in `values` (a nest) by computed ones. Ranks: as in `resolved`."""
    return replace(LazyTensor, LazyTensor.resolved, values)
