"""Read a pickle as plain data, without importing, calling or changing anything that it names."""

import pickle
import pickletools
from collections.abc import Container
from typing import Any

_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
# Opcodes that take objects from the stack, and how many; 0: those above the last mark.
_TAKEN = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2, "TUPLE": 0, "APPENDS": 0, "SETITEMS": 0}
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


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


def read_pickle(content: bytes, names: Container[str]) -> Any:
    """Unpickle into dicts, lists, tuples, plain values and `Record`s.

    Only the opcodes of pickled dataclasses, enums and plain values are supported: no persistent or extension ids, no
    sets, no keyword arguments. None acts on an object of this process.

    `pickle.Unpickler` is not used, although its `find_class` could return inert classes. With Python 3.11 to 3.13, a
    file of 1 MB that has a tuple nested a million times as the key of a dict ends the process (segmentation fault in
    the hash), tuples of tuples that share their items are hashed for ever, and a memo index of 2**28 takes 4 GB.

    Args:
        content: one pickle.
        names: allowed names, in the form `module.name`.
    Raises: UnknownNameError: it has another name. UnpicklingError and others: it is damaged or has another opcode.
    """
    stack, below, memo = list[Any](), list[list[Any]](), dict[int, Any]()  # below: the stacks under each mark
    arg: Any
    for opcode, arg, _ in pickletools.genops(content):
        kind = opcode.name
        if kind in _VALUES:
            stack.append(arg)
        elif kind in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if kind == "MEMOIZE" else arg] = stack[-1]
        elif kind in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[arg])
        elif kind in _CONSTANTS:
            stack.append(_CONSTANTS[kind])
        elif kind in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if kind == "EMPTY_LIST" else {})
        elif kind == "MARK":
            below.append(stack)
            stack = []
        elif kind in _TAKEN:
            if count := _TAKEN[kind]:
                items = [stack.pop() for _ in range(count)][::-1]
            else:
                items, stack = stack, below.pop()
            if kind.startswith("TUPLE"):
                stack.append(tuple(items))
            else:
                _add(stack[-1], items, to_dict=kind.startswith("SET"))
        elif kind in ("GLOBAL", "STACK_GLOBAL"):
            last, first = (stack.pop(), stack.pop()) if kind == "STACK_GLOBAL" else reversed(arg.split(" ", 1))
            if f"{first}.{last}" not in names:
                raise UnknownNameError(f"{first}.{last}"[:200])
            stack.append(Record(f"{first}.{last}"))
        elif kind in ("REDUCE", "NEWOBJ"):
            args, made = stack.pop(), stack.pop()
            stack.append(_created(made, args))
        elif kind == "BUILD":
            state, made = stack.pop(), stack[-1]
            if not (type(made) is Record and made.args is not None and made.state is None):
                raise pickle.UnpicklingError("it sets the state of something other than a new object")
            made.state = state
        elif kind == "STOP":
            return stack.pop()
        elif kind not in ("PROTO", "FRAME"):
            raise pickle.UnpicklingError(f"it has the unsupported opcode {kind}")
    raise pickle.UnpicklingError("it has no end")


def _created(kind: Any, args: Any) -> Any:
    if not (type(kind) is Record and kind.args is None and kind.state is None and type(args) is tuple):
        raise pickle.UnpicklingError("it creates an object of something other than a class")
    # An OrderedDict becomes a dict: the same opcodes fill it.
    return {} if kind.name == "collections.OrderedDict" and not args else Record(kind.name, args)


def _add(target: Any, items: list[Any], *, to_dict: bool) -> None:
    if type(target) is list and not to_dict:
        target.extend(items)
        return
    if type(target) is not dict or not to_dict or len(items) % 2:
        raise pickle.UnpicklingError("it adds items to something other than a list or a dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in (str, int, Record):  # the hash of a deeply nested tuple overflows the stack
            raise pickle.UnpicklingError(f"a dict has a key of the unsupported type {type(key).__name__}")
        target[key] = value
