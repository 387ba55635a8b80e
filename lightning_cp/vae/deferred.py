"""Tensors that are not there yet, so that a loop over tiles hands out all of its work before any of it is done."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

_MISSING = object()


@dataclass(eq=False)
class UnitCall:
    """One call of an encoder or decoder, of a unit that one rank computes from its first call to its last.

    Attributes:
        forward, args, kwargs: what to call; a feature cache among them may be another call's, of the same unit.
        unit: number of the unit.
        result, cache: what it gives; `cache` is filled on the unit's rank only, and None where none is returned.
    """

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    unit: int
    result: Deferred
    cache: Deferred | None

    @property
    def tile(self) -> Tensor:
        """The input, of which the work is proportional to the size."""
        tile = self.args[0]
        assert isinstance(tile, Tensor), "a unit's input is there before the unit is handed out"
        return tile

    def run(self) -> None:
        """Compute here."""
        out = self.forward(*(settle(x) for x in self.args), **{name: settle(x) for name, x in self.kwargs.items()})
        self.result.value = out
        if self.cache is not None:
            self.result.value, self.cache.value = out


@dataclass(eq=False)
class _Operation:
    """A function of values that are not there yet; every rank computes it once they are."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Deferred

    def run(self) -> None:
        self.result.value = _call(self.function, self.args, self.kwargs)


class Worker(Protocol):
    """Computes a batch of calls; afterwards their results are there, on every rank."""

    def __call__(self, calls: list[UnitCall]) -> None: ...


@dataclass(eq=False)
class Batch:
    """What was asked for since results were last needed, in order."""

    worker: Worker
    pending: list[UnitCall | _Operation] = field(default_factory=list)
    units: int = 0
    open_units: dict[int, int] = field(default_factory=dict)  # id of a feature cache (held by its calls) -> unit

    def defer(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Deferred:
        """The result of `function`, later."""
        result = Deferred(self)
        self.pending.append(_Operation(function, args, kwargs, result))
        return result

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, caches: bool) -> Any:
        """The result of a unit's call, later; with `caches` also the feature cache that it returns."""
        args = tuple(settle(x) for x in args)
        result, cache = Deferred(self), Deferred(self) if caches else None
        unit = self._unit_of(kwargs)
        self.pending.append(UnitCall(forward, args, kwargs, unit, result, cache))
        if cache is None:
            return result
        self.open_units[id(cache)] = unit
        return result, cache

    def _unit_of(self, kwargs: dict[str, Any]) -> int:
        """A call that carries a feature cache belongs to the unit of the call before; any other begins one."""
        cache = kwargs.get("feat_cache", kwargs.get("conv_cache"))
        if cache is not None and id(cache) in self.open_units:
            return self.open_units[id(cache)]
        self.units += 1
        if cache is not None:
            self.open_units[id(cache)] = self.units
        return self.units

    def flush(self) -> None:
        """Compute everything. Ranks: all of the context group, having asked for the same."""
        pending, self.pending, self.open_units = self.pending, [], {}
        calls = [entry for entry in pending if isinstance(entry, UnitCall)]
        if calls:
            self.worker(calls)
        for entry in pending:
            if isinstance(entry, _Operation):
                entry.run()


class Deferred:
    """Stands for a tensor in a VAE's tile loop.

    Slices, `torch` functions and modules of it are put off with it; whatever else is asked of it (its shape, to be
    written to) makes the whole batch be computed.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.value: Any = _MISSING

    @property
    def there(self) -> bool:
        """Whether it has been computed."""
        return self.value is not _MISSING

    def settled(self) -> Any:
        """The value, computed now if it was not yet."""
        if not self.there:
            self.batch.flush()
        assert self.there, "a unit's feature cache was asked for on a rank that does not compute it"
        return self.value

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        absent = [x for x in _deferred((args, kwargs)) if not x.there]
        if absent:
            return absent[0].batch.defer(func, args, kwargs or {})
        return _call(func, args, kwargs or {})

    def __getitem__(self, index: Any) -> Any:
        return self.__torch_function__(operator.getitem, (), (self, index))

    def squeeze(self, *dims: int) -> Any:
        """As of a tensor."""
        return self.__torch_function__(Tensor.squeeze, (), (self, *dims))

    def unsqueeze(self, dim: int) -> Any:
        """As of a tensor."""
        return self.__torch_function__(Tensor.unsqueeze, (), (self, dim))

    def __setitem__(self, index: Any, value: Any) -> None:
        self.settled()[index] = settle(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.settled(), name)


def settle(nest: Any) -> Any:
    """`nest` with values in place of what was deferred; a dictionary-like output of diffusers is changed in place."""
    if isinstance(nest, Deferred):
        return nest.settled()
    if not any(True for _ in _deferred(nest)):
        return nest
    if isinstance(nest, (list, tuple)):
        return type(nest)([settle(x) for x in nest])
    for name, x in nest.items():
        nest[name] = settle(x)
    return nest


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*settle(args), **settle(kwargs))


def _deferred(nest: Any) -> Iterator[Deferred]:
    if isinstance(nest, Deferred):
        yield nest
    elif isinstance(nest, (list, tuple)):
        for x in nest:
            yield from _deferred(x)
    elif isinstance(nest, dict):
        for x in nest.values():
            yield from _deferred(x)
