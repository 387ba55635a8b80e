"""Deferred tensors: a VAE's loop over tiles queues all of its tiles before any of them is computed.

`LazyTensor` (pipelines/lazy_tensor.py) cannot be used here: it needs shape, dtype and device from an earlier call, but
only the rank that computes a tile knows the shape, the memory format and the feature cache of its result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from lightning_cp.nest import of_type, replace

_MISSING = object()


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


class Worker(Protocol):
    """Computes a batch of calls and sets their results on every rank."""

    def __call__(self, calls: list[UnitCall]) -> None: ...


@dataclass(eq=False)
class CallQueue:
    """Calls and operations that are queued since the last flush, in order.

    Attributes:
        worker: computes the queued calls.
        pending: queue of calls and operations.
        units: number of units so far.
        open_units: unit by id of a feature cache.
        clear: function that drops the frames that the VAE's convolutions keep between calls; None: they keep none.
            With it, the calls between two uses of `begin_unit` are one unit.
        is_new: True if the next call begins a unit; used with `clear` only.
    """

    worker: Worker
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

    worker: Worker
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
