"""Standing between one object and those who call it. Others of its class are not touched."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from torch import nn

Undo = Callable[[], None]
Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_STATE = "_lightning_cp_interception"


def intercept_calls(thing: Any, around: Around, **attributes: Any) -> Undo:
    """`thing(...)` becomes `around(call, args, kwargs)`, where `call` is what it was; returns what undoes it.

    A module keeps its class, by which diffusers knows components: torch lets an instance have a call of its own.

    Args: attributes: what else the class of something that is no module has then (properties, say).
    """
    if not isinstance(thing, nn.Module):
        return _intercept_class(thing, around, **attributes)
    before = thing.__dict__.get("_compiled_call_impl")
    call: Any = before if before is not None else thing._call_impl
    state = _Interception(around)

    def intercepted(*args: Any, **kwargs: Any) -> Any:
        return state.run(call, args, kwargs)

    thing.__dict__["_compiled_call_impl"] = intercepted

    def undo() -> None:
        state.around = None
        if thing.__dict__.get("_compiled_call_impl") is not intercepted:
            return  # another one was put before it, which goes first
        if before is None:
            del thing.__dict__["_compiled_call_impl"]
        else:
            thing.__dict__["_compiled_call_impl"] = before

    return undo


def intercept_method(thing: Any, name: str, around: Around) -> Undo:
    """The same for `thing.name(...)`. The object keeps its class, and a copy of it calls its own method."""
    state = _Interception(around)
    thing.__dict__[name] = _Method(getattr(thing, name), state)

    def undo() -> None:
        state.around = None
        while isinstance(top := thing.__dict__.get(name), _Method) and top.state.around is None:
            del thing.__dict__[name]  # it, and those below it that were undone before
            if isinstance(top.__wrapped__, _Method):
                thing.__dict__[name] = top.__wrapped__

    return undo


def _intercept_class(thing: Any, around: Around, **attributes: Any) -> Undo:
    """Python looks `__call__` up on the class: the object gets one of its own, derived from and named as its own."""
    kind: Any = type(thing)
    state = _Interception(around)

    @wraps(kind.__call__)
    def intercepted(self: Any, *args: Any, **kwargs: Any) -> Any:
        return state.run(partial(kind.__call__, self), args, kwargs)

    names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    own: Any = type(kind.__name__, (kind,), {"__call__": intercepted, **names, **attributes, _STATE: state})
    own.__qualname__ = kind.__qualname__
    thing.__class__ = own

    def undo() -> None:
        state.around = None
        while _STATE in vars(type(thing)) and vars(type(thing))[_STATE].around is None:
            thing.__class__ = type(thing).__bases__[0]  # it, and those below it that were undone before

    return undo


@dataclass
class _Interception:
    """What stands between; None once it is undone."""

    around: Around | None

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call(*args, **kwargs) if self.around is None else self.around(call, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Interception:
        return self  # undone for copies, too


class _Method:
    """In an object's own attributes, in the place of a method of its class."""

    def __init__(self, bound: Callable[..., Any], state: _Interception) -> None:
        self.__wrapped__, self.state = bound, state  # `inspect.signature` follows the first, and copies rebind it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.state.run(self.__wrapped__, args, kwargs)


def arguments_by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a method. Where they do not fit, those that have a name: the method itself will say so."""
    try:
        given = dict(signature.bind_partial(None, *args, **kwargs).arguments)
    except TypeError:
        return kwargs
    del given[next(iter(signature.parameters))]
    extra = [p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    for name in extra:
        given |= given.pop(name, {})
    return given


def undo_all(undo: list[Undo]) -> None:
    """Undoes the last one first, and empties the list."""
    while undo:
        undo.pop()()


def only_one_shows_progress(pipe: Any, *, shows: bool) -> Undo:
    """Hides the progress of a pipeline's steps on the other ranks."""
    before = dict(getattr(pipe, "_progress_bar_config", {}))
    if not shows and hasattr(pipe, "set_progress_bar_config"):
        pipe.set_progress_bar_config(**{**before, "disable": True})

    def undo() -> None:
        if hasattr(pipe, "set_progress_bar_config"):
            pipe.set_progress_bar_config(**before)

    return undo
