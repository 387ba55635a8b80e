"""Change one object, with a function to undo it: its calls, its methods or an attribute of the instance.

Other objects of the class are not changed. Changes of one attribute may be undone in any order. The engine has its own
way to replace a module's forward (`engine/forwards.py`), because it must replace the innermost function, beneath
wrappers that diffusers and accelerate put on and take off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

Undo = Callable[[], None]
Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_STATE = "_lightning_cp_interception"


def intercept_calls(
    thing: Any, around: Around, *, check_compiled: Callable[[Any], None] | None = None, **attributes: Any
) -> Undo:
    """Make `thing(...)` run `around(call, args, kwargs)`, where `call` is the original call; return an undo function.

    A module keeps its class, because diffusers identifies components by class. Its call is replaced by an attribute of
    the instance that torch reads, `_compiled_call_impl`. A module may be compiled before or afterwards
    (`module.compile()`): the original call is compiled, and `around` runs outside of it. Any other object gets a
    subclass of its class.

    Args:
        thing: module or other callable object.
        around: wrapper of the call.
        check_compiled: gets what `module.compile()` has compiled, and may raise, so that the module stays as it was.
        attributes: attributes of the subclass (for example properties); ignored for a module.
    """
    if not isinstance(thing, nn.Module):
        return _intercept_class(thing, around, **attributes)
    before = thing.__dict__.get("_compiled_call_impl")
    call = thing._call_impl if before is None else before
    intercepted = _InterceptedCall(_Interception(around), call, _Absent if before is None else before)
    thing.__dict__["_compiled_call_impl"] = intercepted
    undo: list[Undo] = [partial(_restore_calls, thing, intercepted)]

    def compile_inside(compile_it: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if getattr(compile_it, "__self__", thing) is not thing:  # of a copy, which is called without the interception
            compile_it(*args, **kwargs)
            return
        compiled = torch.compile(thing._call_impl, *args, **kwargs)
        if check_compiled is not None:
            check_compiled(compiled)
        intercepted.call = intercepted.before = compiled

    if not isinstance(before, _InterceptedCall):  # the innermost
        undo.append(intercept_method(thing, "compile", compile_inside))  # torch's method would drop `intercepted`
    return partial(undo_all, undo)


class _InterceptedCall:
    """The call of a module with an interception around it. A copy of the module has the calls of the original."""

    def __init__(self, state: _Interception, call: Callable[..., Any], before: object) -> None:
        self.state, self.call, self.before = state, call, before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.state.run(self.call, args, kwargs)

    def __deepcopy__(self, memo: object) -> _InterceptedCall:
        return self


def _restore_calls(thing: nn.Module, intercepted: _InterceptedCall) -> None:
    name, intercepted.state.around = "_compiled_call_impl", None
    while isinstance(top := thing.__dict__.get(name), _InterceptedCall) and top.state.around is None:
        _restore(thing, name, top.before)  # this one, and wrappers below it that were undone earlier


def intercept_method(thing: Any, name: str, around: Around) -> Undo:
    """Make `thing.name(...)` run `around(call, args, kwargs)`; return an undo function.

    The object keeps its class, and a copy of it calls the method of the copy. Undo restores the attribute that the
    instance had before (a hook of accelerate, for example).
    """
    state = _Interception(around)
    thing.__dict__[name] = _Method(getattr(thing, name), state, thing.__dict__.get(name, _Absent))

    def undo() -> None:
        state.around = None
        while isinstance(top := thing.__dict__.get(name), _Method) and top.state.around is None:
            _restore(thing, name, top.before)  # this one, and wrappers below it that were undone earlier

    return undo


def set_attribute(thing: Any, name: str, value: object) -> Undo:
    """Set an attribute of the instance, which shadows that of its class; return a function that restores it."""
    before = thing.__dict__.get(name, _Absent)
    thing.__dict__[name] = value
    return partial(_restore, thing, name, before)


def _restore(thing: Any, name: str, before: object) -> None:
    if before is _Absent:
        thing.__dict__.pop(name, None)
    else:
        thing.__dict__[name] = before


def _intercept_class(thing: Any, around: Around, **attributes: Any) -> Undo:
    """Give the object a subclass with the same name, because Python looks up `__call__` on the class."""
    kind: Any = type(thing)
    state = _Interception(around)

    @wraps(kind.__call__)
    def intercepted(self: Any, *args: Any, **kwargs: Any) -> Any:
        return state.run(partial(kind.__call__, self), args, kwargs)

    names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    subclass: Any = type(kind.__name__, (kind,), {"__call__": intercepted, **names, **attributes, _STATE: state})
    subclass.__qualname__ = kind.__qualname__
    thing.__class__ = subclass

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


class _Absent:
    """Marks an attribute that the instance does not have. It is a class, because `deepcopy` does not copy classes."""


class _Method:
    """Instance attribute that shadows a method of the object's class; `before` is the attribute that it replaces."""

    def __init__(self, bound: Callable[..., Any], state: _Interception, before: object) -> None:
        self.__wrapped__, self.state = bound, state  # for `inspect.signature`; `deepcopy` binds it to the copy
        self.before = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.state.run(self.__wrapped__, args, kwargs)


def undo_all(undo: list[Undo]) -> None:
    """Call the functions in `undo`, last to first, and empty the list."""
    while undo:
        undo.pop()()


@dataclass(eq=False)
class Feature:
    """Changes that are installed together, and undone together.

    Attributes: changes: makes one change after another, and yields a function to undo each.
    """

    changes: Callable[[], Iterable[Undo]]
    _undo: list[Undo] = field(default_factory=list)

    def install(self) -> None:
        """Make the changes. After an error, `undo` undoes those before it."""
        for undo in self.changes():
            self._undo.append(undo)

    def undo(self) -> None:
        """Undo the changes that were made, last to first."""
        undo_all(self._undo)
