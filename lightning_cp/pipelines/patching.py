"""Wrap the calls and methods of one object. Other objects of its class are not changed."""

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
    """Make `thing(...)` run `around(call, args, kwargs)`, where `call` is the original call; return an undo function.

    A module keeps its class, because diffusers identifies components by class: torch lets a module instance override
    its call (`_compiled_call_impl`). Any other object gets a subclass of its class.

    Args:
        thing: module or other callable object.
        around: wrapper of the call.
        attributes: attributes of the subclass (for example properties); ignored for a module.
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
            return  # a later wrapper must be undone first; until then this one only forwards
        if before is None:
            del thing.__dict__["_compiled_call_impl"]
        else:
            thing.__dict__["_compiled_call_impl"] = before

    return undo


def intercept_method(thing: Any, name: str, around: Around) -> Undo:
    """Make `thing.name(...)` run `around(call, args, kwargs)`; return an undo function.

    The object keeps its class, and a copy of it calls its own method.
    """
    state = _Interception(around)
    thing.__dict__[name] = _Method(getattr(thing, name), state)

    def undo() -> None:
        state.around = None
        while isinstance(top := thing.__dict__.get(name), _Method) and top.state.around is None:
            del thing.__dict__[name]  # this one, and wrappers below it that were undone earlier
            if isinstance(top.__wrapped__, _Method):
                thing.__dict__[name] = top.__wrapped__

    return undo


def _intercept_class(thing: Any, around: Around, **attributes: Any) -> Undo:
    """Give the object a subclass with the same name, because Python looks up `__call__` on the class."""
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
            thing.__class__ = type(thing).__bases__[0]  # this subclass, and those below it that were undone earlier

    return undo


@dataclass
class _Interception:
    """The wrapper of an intercepted call; `around` is None after it is undone."""

    around: Around | None

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call(*args, **kwargs) if self.around is None else self.around(call, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Interception:
        return self  # shared with copies, so that undo works for them too


class _Method:
    """Instance attribute that shadows a method of the object's class."""

    def __init__(self, bound: Callable[..., Any], state: _Interception) -> None:
        self.__wrapped__, self.state = bound, state  # `inspect.signature` follows `__wrapped__`; copies rebind it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.state.run(self.__wrapped__, args, kwargs)


def arguments_by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a method's arguments by name; only `kwargs` if they do not fit its signature (the method then raises)."""
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
    """Call the functions in `undo`, last to first, and empty the list."""
    while undo:
        undo.pop()()


def only_one_shows_progress(pipe: Any, *, shows: bool) -> Undo:
    """Disable a pipeline's progress bar unless `shows`. Returns: a function to undo it."""
    before = dict(getattr(pipe, "_progress_bar_config", {}))
    if not shows and hasattr(pipe, "set_progress_bar_config"):
        pipe.set_progress_bar_config(**{**before, "disable": True})

    def undo() -> None:
        if hasattr(pipe, "set_progress_bar_config"):
            pipe.set_progress_bar_config(**before)

    return undo
