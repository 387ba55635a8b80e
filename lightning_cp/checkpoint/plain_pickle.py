"""Read a pickle as plain data, without importing, calling or changing anything that it names."""

import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

_PLAIN_OPCODES = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE "
    "BINUNICODE8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST EMPTY_DICT MEMOIZE PUT BINPUT LONG_BINPUT GET "
    "BINGET LONG_BINGET GLOBAL STACK_GLOBAL"
)


class UnknownNameError(Exception):
    """A pickle contains a name that the caller did not allow."""


class Record:
    """A name of the pickle, or an object made from it.

    Args:
        name: `module.name`.
        args: constructor arguments of the object; None for a name.
    `state` is the argument for the object's `__setstate__`, or None.
    """

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] | None = None) -> None:
        self.name, self.args, self.state = name, args, None


def read_pickle(content: bytes, names: Iterable[str]) -> Any:
    """Unpickle into dicts, lists, tuples, plain values and `Record`s.

    Only the opcodes of pickled dataclasses, enums and plain values are supported: no persistent or extension ids, no
    sets, no keyword arguments. This module executes each opcode itself, so none acts on an object of this process.

    Args:
        content: one pickle.
        names: allowed names, in the form `module.name`.
    Raises: UnknownNameError: it has another name. UnpicklingError and others: it is damaged or has another opcode.
    """
    return _Unpickler(io.BytesIO(content), frozenset(names)).load()


_Interpreter: Any = pickle._Unpickler  # the pure-Python class: its opcodes can be replaced


class _Unpickler(_Interpreter):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, names: frozenset[str]) -> None:
        super().__init__(file)
        self._names = names

    def find_class(self, module: str, name: str) -> Record:
        if f"{module}.{name}" not in self._names:
            raise UnknownNameError(f"{module}.{name}"[:200])
        return Record(f"{module}.{name}")

    def _create(self) -> None:
        args, kind = self.stack.pop(), self.stack.pop()
        if not (type(kind) is Record and kind.args is None and kind.state is None and type(args) is tuple):
            raise pickle.UnpicklingError("it creates an object of something other than a class")
        # An OrderedDict becomes a dict: the same opcodes fill it.
        self.append({} if kind.name == "collections.OrderedDict" and not args else Record(kind.name, args))

    def _build(self) -> None:
        state, created = self.stack.pop(), self.stack[-1]
        if not (type(created) is Record and created.args is not None and created.state is None):
            raise pickle.UnpicklingError("it sets the state of something other than a new object")
        created.state = state

    def _append(self) -> None:
        self._extend([self.stack.pop()])

    def _appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise pickle.UnpicklingError("it appends to something other than a list")
        self.stack[-1].extend(items)

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def _setitems(self) -> None:
        self._update(self.pop_mark())

    def _update(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not dict or len(items) % 2:
            raise pickle.UnpicklingError("it sets items of something other than a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int, Record):  # the hash of a deeply nested tuple overflows the stack
                raise pickle.UnpicklingError(f"a dict has a key of the unsupported type {type(key).__name__}")
            self.stack[-1][key] = value

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **{
            getattr(pickle, name)[0]: _Interpreter.dispatch[getattr(pickle, name)[0]] for name in _PLAIN_OPCODES.split()
        },
        pickle.REDUCE[0]: _create,
        pickle.NEWOBJ[0]: _create,
        pickle.BUILD[0]: _build,
        pickle.APPEND[0]: _append,
        pickle.APPENDS[0]: _appends,
        pickle.SETITEM[0]: _setitem,
        pickle.SETITEMS[0]: _setitems,
    }
