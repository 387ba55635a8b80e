"""Standing between an object and those who call it, without touching its class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

Undo = Callable[[], None]
Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def intercept_calls(thing: Any, around: Around, **attributes: Any) -> Undo:
    """`thing(...)` becomes `around(call, args, kwargs)`, where `call` is what it was; returns what undoes it.

    Python looks `__call__` up on the class, so the object gets a class of its own, derived from and named as the one
    that it had.

    Args: attributes: what else the class of its own has (properties, say).
    """
    kind: Any = type(thing)

    @wraps(kind.__call__)
    def intercepted(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(partial(kind.__call__, self), args, kwargs)

    names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    own = type(kind.__name__, (kind,), {"__call__": intercepted, **names, **attributes})
    own.__qualname__ = kind.__qualname__
    thing.__class__ = own

    def undo() -> None:
        thing.__class__ = kind

    return undo


def intercept_method(thing: Any, name: str, around: Around) -> Undo:
    """The same for `thing.name(...)`."""
    call: Any = getattr(thing, name)

    @wraps(call)
    def intercepted(*args: Any, **kwargs: Any) -> Any:
        return around(call, args, kwargs)

    before = thing.__dict__.get(name)
    thing.__dict__[name] = intercepted

    def undo() -> None:
        if before is None:
            del thing.__dict__[name]
        else:
            thing.__dict__[name] = before

    return undo


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


def only_one_shows_progress(pipe: Any, *, shows: bool) -> Undo:
    """Hides the progress of a pipeline's steps on the other ranks."""
    before = dict(getattr(pipe, "_progress_bar_config", {}))
    if not shows and hasattr(pipe, "set_progress_bar_config"):
        pipe.set_progress_bar_config(**{**before, "disable": True})

    def undo() -> None:
        if hasattr(pipe, "set_progress_bar_config"):
            pipe.set_progress_bar_config(**before)

    return undo
