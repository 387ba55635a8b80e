"""Lazy tensors for results that another rank computes: all are filled in when the first one is read.

Some pipelines call their transformer once per branch of guidance. With CFG parallelism, each rank computes the calls of
its own branch only and gets a `LazyTensor` for the calls of the others. With stages of blocks, the last stage has the
results. The rank that has a result gets a `LazyTensor` for it too, so all ranks reach the first read, and the exchange
that it needs, at the same point of the program. Operations between the calls may therefore cost speed, but never change
the result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from lightning_cp.comm.packet import all_gather_tensors, layout_of
from lightning_cp.compat.torch_names import aten, is_functional, make_wrapper_subclass
from lightning_cp.mesh.groups import MeshGroups
from lightning_cp.nest import of_type, replace

_aten = torch.ops.aten
# Operators that pipelines apply to one branch's result before they call the next branch; deferred until the exchange.
_LATER = (aten("_to_copy"), _aten.clone, _aten.neg, _aten.mul, _aten.div, _aten.add, _aten.sub, _aten.rsub)
_JOINS = (_aten.stack, _aten.cat)  # of the samples of one branch; also deferred


# A deferred operator with its arguments, after the tensor that takes its result.
Deferred = tuple[Tensor, "partial[Tensor]"]


class LazyResults(ABC):
    """Results that another rank computes, and the operators that are deferred until they arrive."""

    @abstractmethod
    def is_waiting(self) -> bool:
        """Return True while there are results that have not arrived."""

    def is_computed(self, lazy: Sequence[LazyTensor]) -> bool:
        """Return True if lazy tensors have their values, although other results have not arrived."""
        return False

    @abstractmethod
    def can_defer(self, function: Any, lazy: Sequence[LazyTensor]) -> bool:
        """Return True if an operator on lazy tensors may be computed later. Other operators need the results now."""

    @abstractmethod
    def flush(self) -> None:
        """Wait for all results and compute the deferred operators. Ranks: all between which results are exchanged."""

    @abstractmethod
    def defer(self, buffer: Tensor, function: partial[Tensor]) -> None:
        """Compute an operator later, and copy its result into `buffer`."""


@dataclass
class _Result:
    """Tensors of one call, and the rank of the group that has them (`owner`); None: every rank has them."""

    owner: int | None
    tensors: list[Tensor]


@dataclass(eq=False)
class PendingGathers(LazyResults):
    """Results of the branches of guidance that are not exchanged yet.

    Attributes:
        groups: the ranks between which results are exchanged.
        on_flush: called after each exchange with its number of transformer calls.
        before_flush: called before each exchange.
        results: tensors of the pending calls, in call order.
        later: deferred operators.
    """

    groups: MeshGroups
    on_flush: Callable[[int], None] = lambda calls: None
    before_flush: Callable[[], None] = lambda: None
    results: list[_Result] = field(default_factory=list)
    later: list[Deferred] = field(default_factory=list)

    def lazy_tensors(self, tensors: list[Tensor], owner: int | None) -> list[LazyTensor]:
        """Return lazy tensors for one call; `tensors` hold values if `owner` is this rank or None."""
        self.results.append(_Result(owner, tensors))
        return [LazyTensor(x, self) for x in tensors]

    @override
    def is_waiting(self) -> bool:
        return bool(self.results)

    @override
    def can_defer(self, function: Any, lazy: Sequence[LazyTensor]) -> bool:
        return function.overloadpacket in _JOINS or (len(lazy) == 1 and function.overloadpacket in _LATER)

    @override
    def defer(self, buffer: Tensor, function: partial[Tensor]) -> None:
        self.later.append((buffer, function))

    @override
    def flush(self) -> None:
        """Exchange all pending results and run the deferred operators. Ranks: all of `groups`."""
        results, later = self.results, self.later
        if not results:
            return
        self.results, self.later = [], []
        self.before_flush()
        _exchange(results, self.groups)
        compute(later)
        self.on_flush(len(results))

    def drop(self) -> None:
        """Drop pending results without an exchange, at the end of a pipeline call."""
        self.results, self.later = [], []


def compute(later: Sequence[Deferred]) -> None:
    """Compute deferred operators, in order."""
    for buffer, function in later:
        buffer.copy_(function())


def _exchange(results: list[_Result], groups: MeshGroups) -> None:
    by_owner = [[x for r in results if r.owner == owner for x in r.tensors] for owner in range(groups.context_size)]
    if not any(by_owner):
        return
    layouts = [layout_of(tensors) for tensors in by_owner]
    device, branch = results[0].tensors[0].device, groups.context_rank
    received = all_gather_tensors(by_owner[branch], layouts, device=device, group=groups.context)
    for rank, tensors in enumerate(received):
        if rank != branch:
            for buffer, values in zip(by_owner[rank], tensors, strict=True):
                buffer.copy_(values)


class LazyTensor(Tensor):
    """A tensor that may not be computed yet. Its views are lazy too; the first read triggers the exchange.

    Attributes:
        buffer: takes the values.
        pending: the results that it depends on.
        after: number of results of a pipeline call after which it can be computed.
    """

    buffer: Tensor
    pending: LazyResults
    after: int

    @staticmethod
    def __new__(cls, buffer: Tensor, pending: LazyResults, after: int = 0) -> LazyTensor:
        tensor: LazyTensor = make_wrapper_subclass(
            cls,
            buffer.shape,
            strides=buffer.stride(),
            storage_offset=buffer.storage_offset(),
            dtype=buffer.dtype,
            device=buffer.device,
        )
        tensor.buffer, tensor.pending, tensor.after = buffer, pending, after
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # operators arrive whole here, and some views of them are copies
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        lazy = list(of_type(LazyTensor, (args, kwargs)))
        pending = lazy[0].pending
        if pending.is_waiting():
            if func.is_view and len(lazy) == 1:
                args, kwargs = with_buffers((args, kwargs))
                return replace(Tensor, lambda x: LazyTensor(x, pending, lazy[0].after), func(*args, **kwargs))
            if is_functional(func) and pending.is_computed(lazy):
                args, kwargs = with_buffers((args, kwargs))
                return func(*args, **kwargs)
            buffer = _empty_result(func, args, kwargs) if pending.can_defer(func, lazy) else None
            if buffer is not None:
                args, kwargs = replace(Tensor, _snapshot, (args, kwargs))
                pending.defer(buffer, partial(func, *args, **kwargs))
                return LazyTensor(buffer, pending, max(x.after for x in lazy))
        for tensor in lazy:
            tensor.pending.flush()
        args, kwargs = with_buffers((args, kwargs))
        return func(*args, **kwargs)

    def resolved(self) -> Tensor:
        """Return the computed tensor. Ranks: all between which results are exchanged."""
        self.pending.flush()
        return self.buffer

    # These methods read memory without passing through the dispatcher.

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.resolved().clone()

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


def with_buffers(values: Any) -> Any:
    """Replace the lazy tensors in `values` (a nest) by the tensors that hold, or will hold, their values."""
    return replace(LazyTensor, lambda x: x.buffer, values)


def _snapshot(x: Tensor) -> Tensor:
    """Return a lazy tensor's buffer, or a copy of another tensor: it may be changed before the operator runs."""
    return x.buffer if isinstance(x, LazyTensor) else x.clone()


def _empty_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Allocate the result of an operator, zeros; None if its shape depends on values, or its arguments are invalid."""
    if kwargs.get("out") is not None:
        return None
    device = kwargs.get("device") or next(of_type(LazyTensor, (args, kwargs))).device
    args, kwargs = replace(
        Tensor, _without_values, (args, {**kwargs, "device": "meta"} if "device" in kwargs else kwargs)
    )
    try:
        result = func(*args, **kwargs)
    except Exception:  # it raises again where it is computed
        return None
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=device).zero_()


def _without_values(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def resolve_all(values: Any) -> Any:
    """Replace the lazy tensors in `values` (a nest) by computed ones. Ranks: as in `resolved`."""
    return replace(LazyTensor, LazyTensor.resolved, values)
