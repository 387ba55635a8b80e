"""Results that another rank computes: tensors that are filled in when the first of them is read.

Pipelines with several branches of guidance call their transformer once for each, one call after another. Each rank
computes the calls of its own branch only and is given promises for the others'. Promises are kept on *all* ranks, by
those who computed too, so that all of them come to the first reading, and to the exchange that it needs, at the same
point of the program. What a pipeline does between its calls therefore costs speed at worst, and never the result.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map_only
from typing_extensions import override

from lightning_cp.comm.packet import layout_of, pack, packet_bytes, unpack
from lightning_cp.comm.packets import all_gather_packets
from lightning_cp.mesh import Branches

_aten = torch.ops.aten
# What pipelines do to one branch's result before they call for the next; done when the promise is kept.
_LATER = (_aten._to_copy, _aten.clone, _aten.neg, _aten.mul, _aten.div, _aten.add, _aten.sub, _aten.rsub)


@dataclass
class _Result:
    """Tensors of one call, and which branch's rank computes them; None: every rank did."""

    owner: int | None
    tensors: list[Tensor]


@dataclass(eq=False)
class PendingGathers:
    """The promises of a pipeline that are not kept yet.

    Attributes:
        branches: of this rank.
        on_settle: is told how many calls each exchange was for.
    """

    branches: Branches
    on_settle: Callable[[int], None] = lambda calls: None
    results: list[_Result] = field(default_factory=list)
    later: list[tuple[Tensor, Callable[[], Tensor]]] = field(default_factory=list)

    def promise(self, tensors: list[Tensor], owner: int | None) -> list[LazyTensor]:
        """Promises for the tensors of one call: there already if `owner` is this rank's branch or None."""
        self.results.append(_Result(owner, tensors))
        return [LazyTensor(x, self) for x in tensors]

    def compute_later(self, function: Callable[[], Tensor], held: Tensor) -> LazyTensor:
        """A promise for what `function` will give, to be put into `held`."""
        self.later.append((held, function))
        return LazyTensor(held, self)

    def settle(self) -> None:
        """Keep all promises. Ranks: those of all branches that hold the same tokens."""
        results, later = self.results, self.later
        if not results:
            return
        self.results, self.later = [], []
        _exchange(results, self.branches)
        for held, function in later:
            held.copy_(function())
        self.on_settle(len(results))

    def drop(self) -> None:
        """Forget what nobody will read any more."""
        self.results, self.later = [], []


def _exchange(results: list[_Result], branches: Branches) -> None:
    by_owner = [[x for r in results if r.owner == owner for x in r.tensors] for owner in range(branches.cfg)]
    if not any(by_owner):
        return
    mine, layouts = by_owner[branches.cfg_rank], [layout_of(tensors) for tensors in by_owner]
    packet = pack(mine) if mine else torch.empty(0, dtype=torch.uint8, device=results[0].tensors[0].device)
    packets = all_gather_packets(packet, [packet_bytes(layout) for layout in layouts], group=branches.across.context)
    for rank, (tensors, layout) in enumerate(zip(by_owner, layouts, strict=True)):
        if rank != branches.cfg_rank:
            for held, came in zip(tensors, unpack(packets[rank], layout), strict=True):
                held.copy_(came)


class LazyTensor(Tensor):
    """A tensor that may not be there yet. Its views are promises too; whatever reads it waits for it."""

    held: Tensor
    ledger: PendingGathers

    @staticmethod
    def __new__(cls, held: Tensor, ledger: PendingGathers) -> LazyTensor:
        promise: LazyTensor = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=held.device,
        )
        promise.held, promise.ledger = held, ledger
        return promise

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        promises = [x for x in tree_iter((args, kwargs)) if isinstance(x, LazyTensor)]
        ledger = promises[0].ledger
        if ledger.results and len(promises) == 1:
            if func.is_view:
                args, kwargs = _held((args, kwargs))
                return tree_map_only(Tensor, lambda x: LazyTensor(x, ledger), func(*args, **kwargs))
            if func.overloadpacket in _LATER and "out" not in kwargs:
                args, kwargs = tree_map_only(Tensor, _as_now, (args, kwargs))
                return ledger.compute_later(partial(func, *args, **kwargs), _room_for(func, args, kwargs))
        for promise in promises:
            promise.ledger.settle()
        args, kwargs = _held((args, kwargs))
        return func(*args, **kwargs)

    def kept(self) -> Tensor:
        """The tensor itself. Ranks: as of `PendingGathers.settle`."""
        self.ledger.settle()
        return self.held

    # These read memory without passing through the dispatcher.

    @override
    def numpy(self, *, force: bool = False) -> Any:
        return self.kept().numpy(force=force)

    @override
    def tolist(self) -> Any:
        return self.kept().tolist()

    @override
    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.kept().__array__(*args, **kwargs)  # type: ignore[no-untyped-call]

    @override
    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"Promise({self.kept()!r})"


def _held(values: Any) -> Any:
    return tree_map_only(LazyTensor, lambda x: x.held, values)


def _as_now(x: Tensor) -> Tensor:
    """What a promise will be, or what another tensor is: that may be written to before the promise is kept."""
    return x.held if isinstance(x, LazyTensor) else x.clone()


def _room_for(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Room for what an operator of one value at a time gives."""
    shape = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        *(x.shape for x in tree_iter((args, kwargs)) if isinstance(x, Tensor))
    )
    none_of = tree_map_only(Tensor, lambda x: x.new_empty((0,) * x.ndim) if x.ndim else x, (args, kwargs))
    one: Tensor = func(*none_of[0], **none_of[1])
    return one.new_empty(shape)


def resolve_all(values: Any) -> Any:
    """`values` (a nest) with every promise kept. Ranks: as of `PendingGathers.settle`, if there is one among them."""
    if not any(isinstance(x, LazyTensor) for x in tree_iter(values)):
        return values
    if isinstance(values, OrderedDict):  # a result of diffusers, which cannot be made again from what it holds
        for name, value in list(values.items()):
            values[name] = resolve_all(value)
        return values
    return tree_map_only(LazyTensor, lambda x: x.kept(), values)
