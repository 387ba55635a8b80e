"""Compute the tiles of a VAE on several ranks, bitwise equal to one process.

A VAE's loop over tiles runs on deferred tensors, so that it queues all of its tiles before any of them is computed.
Then they are assigned to ranks, which exchange the results. `LazyTensor` (pipelines/lazy_tensor.py) cannot be used
here: it needs shape, dtype and device from an earlier call, but only the rank that computes a tile knows the shape, the
memory format and the feature cache of its result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cp.comm.packet import Piece, all_gather_tensors
from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.mesh.degrees import Shares
from lightning_cp.mesh.groups import MeshGroups
from lightning_cp.nest import of_type, replace

_MISSING = object()
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MAX_DIMS = 5
# Fields of a result's layout: dtype, number of dims, then sizes and dim indices, both outermost in memory first.
_FIELDS = 2 + 2 * _MAX_DIMS


@dataclass(eq=False)
class UnitCall:
    """One call of an encoder or decoder. All calls of a unit (a tile, over time) are computed by the same rank.

    Attributes:
        forward: function to call.
        args, kwargs: its arguments; may include the deferred feature cache of an earlier call of the same unit.
        unit: number of the unit.
        prepare: function that the unit's rank calls before `forward`; None: nothing to prepare.
        result: output tensor.
        cache: returned feature cache, set on the unit's rank only; None if `forward` returns no cache.
    """

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    unit: int
    result: Deferred
    cache: Deferred | None
    prepare: Callable[[], Any] | None = None

    @property
    def tile(self) -> Tensor:
        """Return the input tile; the cost of the call is proportional to its size."""
        tile = self.args[0]
        assert isinstance(tile, Tensor), "the input tile of a call is a computed tensor"
        return tile

    def run(self) -> None:
        """Compute the call on this rank and set `result` and `cache`."""
        if self.prepare is not None:
            self.prepare()
        out = self.forward(
            *(resolve_deferred(x) for x in self.args), **{name: resolve_deferred(x) for name, x in self.kwargs.items()}
        )
        self.result.value = out
        if self.cache is not None:
            self.result.value, self.cache.value = out


@dataclass(eq=False)
class _Operation:
    """A function of deferred values; every rank computes it after they are available."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Deferred

    def run(self) -> None:
        self.result.value = _call(self.function, self.args, self.kwargs)


@dataclass(eq=False)
class CallQueue:
    """Calls and operations that are queued since the last flush, in order.

    Attributes:
        worker: computes the queued calls, and sets their results on every rank.
        pending: queue of calls and operations.
        units: number of units so far.
        open_units: unit by id of a feature cache.
        clear: function that drops the frames that the VAE's convolutions keep between calls; None: they keep none.
            With it, the calls between two uses of `begin_unit` are one unit.
        is_new: True if the next call begins a unit; used with `clear` only.
    """

    worker: TileWorker
    pending: list[UnitCall | _Operation] = field(default_factory=list)
    units: int = 0
    open_units: dict[int, int] = field(default_factory=dict)  # ids stay valid: pending calls keep the caches alive
    clear: Callable[[], Any] | None = None
    is_new: bool = True

    def begin_unit(self) -> None:
        """Begin a unit of calls that share the frames that convolutions keep."""
        self.is_new = True

    def defer(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Deferred:
        """Queue `function` and return its deferred result."""
        result = Deferred(self)
        self.pending.append(_Operation(function, args, kwargs, result))
        return result

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, caches: bool) -> Any:
        """Queue a call of a unit and return its deferred result; with `caches`, also its deferred feature cache."""
        args = tuple(resolve_deferred(x) for x in args)
        result, cache = Deferred(self), Deferred(self) if caches else None
        unit = self._unit_of(kwargs)
        prepare, self.is_new = self.clear if self.is_new else None, False
        self.pending.append(UnitCall(forward, args, kwargs, unit, result, cache, prepare))
        if cache is None:
            return result
        self.open_units[id(cache)] = unit
        return result, cache

    def _unit_of(self, kwargs: dict[str, Any]) -> int:
        """Return the unit of a call: that of its feature cache, or a new unit if the cache is new or there is none."""
        if self.clear is not None and not self.is_new:
            return self.units
        cache = kwargs.get("feat_cache", kwargs.get("conv_cache"))
        if cache is not None and id(cache) in self.open_units:
            return self.open_units[id(cache)]
        self.units += 1
        if cache is not None:
            self.open_units[id(cache)] = self.units
        return self.units

    def flush(self) -> None:
        """Compute everything that is queued. Ranks: all of the context group, with equal queues."""
        pending, self.pending, self.open_units = self.pending, [], {}
        calls = [entry for entry in pending if isinstance(entry, UnitCall)]
        if calls:
            self.worker(calls)
        for entry in pending:
            if isinstance(entry, _Operation):
                entry.run()


@dataclass(eq=False)
class Rehearsal:
    """Runs a loop over tiles twice: first to collect its calls, then with their results.

    For loops that write the tiles into a buffer and read it, which deferred results do not support.

    Attributes:
        worker: computes the calls.
        calls: calls of the first run; their results are returned in the second.
        results: iterator over the results; None in the first run.
    """

    worker: TileWorker
    calls: list[UnitCall] = field(default_factory=list)
    results: Iterator[Any] | None = None

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, caches: bool) -> Any:
        """In the first run, record a call and return a scalar 0, which a buffer of any shape accepts.

        In the second run, return the result of the call.
        """
        if self.results is not None:
            return next(self.results)
        self.calls.append(UnitCall(forward, args, kwargs, len(self.calls), Deferred(CallQueue(self.worker)), None))
        return args[0].new_zeros(())

    def run(self, loop: Callable[[], Any]) -> Any:
        """Run the loop twice. Ranks: all of the context group, with equal inputs."""
        loop()
        if self.calls:
            self.worker(self.calls)
        self.results = iter([call.result.value for call in self.calls])
        return loop()


class Deferred:
    """Deferred tensor in a VAE's tile loop.

    Slices, `torch` functions and modules applied to it are deferred too. Any other access (its shape, an assignment)
    computes the whole batch.
    """

    def __init__(self, queue: CallQueue) -> None:
        self.queue = queue
        self.value: Any = _MISSING

    @property
    def is_computed(self) -> bool:
        """Return True if the value is computed."""
        return self.value is not _MISSING

    def resolved(self) -> Any:
        """Return the value; compute the batch first if necessary."""
        if not self.is_computed:
            self.queue.flush()
        assert self.is_computed, "a feature cache is only on the rank that computes its unit"
        return self.value

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        pending = [x for x in of_type(Deferred, (args, kwargs)) if not x.is_computed]
        if pending:
            return pending[0].queue.defer(func, args, kwargs or {})
        return _call(func, args, kwargs or {})

    def __getitem__(self, index: Any) -> Any:
        return self.__torch_function__(operator.getitem, (), (self, index))

    def squeeze(self, *dims: int) -> Any:
        """Defer `Tensor.squeeze`."""
        return self.__torch_function__(Tensor.squeeze, (), (self, *dims))

    def unsqueeze(self, dim: int) -> Any:
        """Defer `Tensor.unsqueeze`."""
        return self.__torch_function__(Tensor.unsqueeze, (), (self, dim))

    def __setitem__(self, index: Any, value: Any) -> None:
        self.resolved()[index] = resolve_deferred(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.resolved(), name)


def resolve_deferred(nest: Any) -> Any:
    """Replace the deferred values in `nest` by computed ones; a diffusers output (dict-like) is changed in place."""
    return replace(Deferred, Deferred.resolved, nest)


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*resolve_deferred(args), **resolve_deferred(kwargs))


def owners(costs: dict[int, int], ranks: int, shares: Shares | None = None) -> dict[int, int]:
    """Assign units to ranks, most expensive unit first, each to the rank that is done with it first.

    Args: shares: relative speed of each rank; None: equal. Returns: rank of each unit, the same on every rank.
    """
    speeds = shares or (1,) * ranks
    loads, owner = [0] * ranks, {}
    for unit in sorted(costs, key=lambda unit: (-costs[unit], unit)):
        owner[unit] = min(range(ranks), key=lambda rank: Fraction(loads[rank] + costs[unit], speeds[rank]))
        loads[owner[unit]] += costs[unit]
    return owner


class _Tile(NamedTuple):
    """Layout of a result in a packet: its dims with the outermost in memory first, and their original indices.

    The receiver restores the memory format, because on CPU a convolution may round differently in channels_last.
    """

    piece: Piece
    order: list[int]


@dataclass(frozen=True)
class TileWorker:
    """Computes a batch of calls over the ranks of a context group.

    Ranks: all of the group, with equal batches. Communication: an all-gather of ints, and one packet to every peer.
    Raises: RuntimeError: another rank failed; that rank raises its own error.
    """

    groups: MeshGroups

    def __call__(self, calls: list[UnitCall]) -> None:
        costs: dict[int, int] = {}
        for call in calls:
            costs[call.unit] = costs.get(call.unit, 0) + call.tile.numel()
        owner = owners(costs, self.groups.context_size, self.groups.shares)
        by_rank = [[call for call in calls if owner[call.unit] == rank] for rank in range(self.groups.context_size)]
        local_calls, failure = by_rank[self.groups.context_rank], None
        try:
            for call in local_calls:
                call.run()
        except Exception as error:  # reported to the other ranks before it is raised: they wait for this rank
            failure = error
        layouts = self._layouts(calls, local_calls, failure)
        tiles = [call.result.value.permute(layouts[id(call)].order).contiguous() for call in local_calls]
        pieces = [[layouts[id(call)].piece for call in theirs] for theirs in by_rank]
        received = all_gather_tensors(tiles, pieces, device=calls[0].tile.device, group=self.groups.context)
        for rank, (theirs, results) in enumerate(zip(by_rank, received, strict=True)):
            if rank != self.groups.context_rank:
                for call, tile in zip(theirs, results, strict=True):
                    order = layouts[id(call)].order
                    call.result.value = tile.permute([order.index(dim) for dim in range(tile.ndim)])

    def _layouts(
        self, calls: list[UnitCall], local_calls: list[UnitCall], failure: Exception | None
    ) -> dict[int, _Tile]:
        """All-gather the layouts of all results, by id of the call; each rank provides those of its own calls."""
        assert self.groups.context is not None, "a group of one computes tiles itself"
        values = [int(failure is not None)]
        computed = {id(call) for call in local_calls} if failure is None else set()
        for call in calls:
            entry = [0] * _FIELDS
            if id(call) in computed:
                x = call.result.value
                order = sorted(range(x.ndim), key=x.stride, reverse=True)
                entry[: 2 + 2 * x.ndim] = _DTYPES.index(x.dtype), x.ndim, *[x.shape[dim] for dim in order], *order
            values += entry
        everyone = all_gather_ints(values, group=self.groups.context)
        if failure is not None:
            raise failure
        failed = [rank for rank, (has_failed, *_) in enumerate(everyone) if has_failed]
        if failed:
            raise RuntimeError(
                f"rank {failed[0]} of the context group could not compute its VAE tiles: see its error message"
            )
        total = [sum(column) for column in zip(*everyone, strict=True)][1:]
        entries = [total[i * _FIELDS : (i + 1) * _FIELDS] for i in range(len(calls))]
        return {
            id(call): _Tile(Piece(tuple(rest[:dims]), _DTYPES[dtype]), rest[dims : 2 * dims])
            for call, (dtype, dims, *rest) in zip(calls, entries, strict=True)
        }
