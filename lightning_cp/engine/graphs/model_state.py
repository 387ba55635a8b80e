"""What a forward of a model reads besides its arguments: Python values of its modules, and the addresses of weights."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from contextlib import suppress
from functools import partial
from inspect import Signature
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cp.engine.hook_base import EngineHook
from lightning_cp.engine.peers.checksum import plain_tensors, version_of

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# Objects without values that a forward reads
_CODE = (FunctionType, MethodType, BuiltinFunctionType, type, torch.Generator, weakref.ref, ModuleType, Signature)
_CONTAINERS = (dict, list, tuple, set, frozenset)
_DEPTH = 8  # of containers and objects inside a module's attributes
_MOST_STATES = 64


class ModelState:
    """The values that a model's modules hold: numbers and texts by value, all other objects by identity.

    It includes those in lists and dicts, in attention processors and in the layers of adapters, and leaves out the
    engine's own objects. While all objects are the same, a check runs in C. Only otherwise are values compared.

    Attributes:
        number: of these values: the same one if the model has had them before.
        is_sharded: some weights are DTensors.
        opaque: an attribute with an object of which no change could be noticed, and its class; "" if there is none.
        hooked: path of a module with a forward hook of the user; "" if there is none.
        changed: the attribute in which the values differ from those of the call before.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: dict[Hashable, tuple[int, list[object]]] = {}
        self._names: list[str] = []
        self._attributes: list[dict[Any, Any]] = []  # of modules and objects
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[Any] = []
        self._empty: list[Any] = []
        self._on_host: list[Tensor] = []  # besides weights: kernels get their numbers, not their addresses
        self._caches: list[Any] = []
        self._lengths: list[int] = []
        self._values: list[object] = []
        self._fingerprint: tuple[Hashable, ...] = ()
        self._noted: list[int] = []
        self._count = 0
        self.changed = ""
        self._read()

    def refresh(self) -> None:
        """Compare the values with those of the call before, and set all attributes to those of now."""
        is_equal = self._count_values() == self._lengths and not any(self._empty)
        is_equal = is_equal and list(map(version_of, self._on_host)) == self._versions
        if not is_equal or (not all(map(is_, self._held(), self._values)) and not self._adopt_copies()):
            self._read()

    def weights_moved(self) -> bool:
        """Return True if a parameter or buffer was moved, exchanged, added or removed since `note_weights`."""
        return self._addresses() != self._noted

    def note_weights(self) -> None:
        """Note where weights are now."""
        self._noted = self._addresses()

    def full_cache(self) -> str:
        """Return the name of a function with a full `lru_cache`, which drops tensors that a graph reads; "" if none is.

        Diffusers caches positions by size, for example. Replays do not call the function, so they count as no use.
        """
        infos = ((x.__qualname__, x.cache_info()) for x in self._caches)
        return next((name for name, info in infos if info.maxsize is not None and info.currsize >= info.maxsize), "")

    def device(self) -> torch.device | None:
        """Return the device of all weights; None if there are several, or no weights."""
        devices = {x.device for x in self._weights}
        return devices.pop() if len(devices) == 1 else None

    def _count_values(self) -> list[int]:
        return [*map(len, self._attributes), *map(len, self._dicts), *map(len, self._lists)]

    def _held(self) -> Iterator[object]:
        """Yield all values and names."""
        flat, values = chain.from_iterable, dict.values
        named = flat(map(values, self._attributes)), flat(map(values, self._dicts))
        return chain(*named, flat(self._attributes), flat(self._dicts), flat(self._lists))

    def _adopt_copies(self) -> bool:
        """Return True if only lists were replaced, by lists of the same objects (QwenImage 2.1, in each forward)."""
        held = list(self._held())
        copies: dict[int, object] = {}
        for new, old in zip(held, self._values, strict=True):
            if new is old:
                continue
            if type(new) is not list or type(old) is not list or len(new) != len(old) or not all(map(is_, new, old)):
                return False
            copies[id(old)] = new
        if any(id(x) in copies for x in held):  # it is still held under another name
            return False
        self._lists = [copies.get(id(x), x) for x in self._lists]
        self._values = held
        return True

    def _addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._weights))

    def _read(self) -> None:
        """Walk all modules, and give their values a number."""
        before = self._fingerprint, self._names
        self._attributes, self._dicts, self._lists, self._empty = [], [], [], []
        self._names, values = [], list[Hashable]()
        seen: set[int] = set()
        self._modules, self.opaque, self._on_host = set(self._module.modules()), "", []
        weights = [*self._module.parameters(), *self._module.buffers()]
        known = set(map(id, weights))
        for path, module in self._module.named_modules():
            for name, value in self._walk(path, vars(module), seen, _DEPTH, self._attributes):
                self._names.append(name)
                if isinstance(value, Tensor) and value.device.type == "cpu" and id(value) not in known:
                    self._on_host.append(value)
                    values.append((id(value), version_of(value)))
                else:
                    values.append(compared(value))
        self._versions = list(map(version_of, self._on_host))
        classes = dict.fromkeys(kind for module in self._modules for kind in type(module).__mro__)
        self._caches = [x for kind in classes for x in _held_functions(kind) if hasattr(x, "cache_info")]
        self._values, self._lengths = list(self._held()), self._count_values()
        self.hooked = next((path or "the model" for path, x in self._module.named_modules() if _has_hooks(x)), "")
        self.is_sharded = any(isinstance(x, DTensor) for x in weights)
        self._weights = [x for weight in weights for _, x in plain_tensors("", weight) if not isinstance(x, DTensor)]
        self._fingerprint = (*values, *self._names)
        if self._fingerprint not in self._known:
            if len(self._known) >= _MOST_STATES:
                self._known.clear()
            self._count += 1
            self._known[self._fingerprint] = self._count, self._values  # identities stay valid while objects are held
        self.number = self._known[self._fingerprint][0]
        self.changed = self._difference(*before)

    def _difference(self, fingerprint: tuple[Hashable, ...], names: list[str]) -> str:
        if names != self._names:
            return "its modules"
        pairs = zip(self._names, fingerprint, self._fingerprint, strict=False)
        return next((name for name, a, b in pairs if a != b), "")

    def _walk(self, path: str, value: Any, seen: set[int], depth: int, into: list[Any]) -> Iterator[tuple[str, object]]:
        """Yield the values in a container with their names, and note the containers to compare in later calls."""
        if id(value) in seen:
            return
        seen.add(id(value))
        (into if value else self._empty).append(value)
        if isinstance(value, dict):
            items = [(f"{path}.{name}" if path else str(name), x) for name, x in value.items() if not _is_ours(name)]
        else:
            items = [(f"{path}[{i}]", x) for i, x in enumerate(value)]
        for name, x in items:
            yield name, x
            inner = x if isinstance(x, _CONTAINERS) else self._attributes_of(name, x)
            into = self._attributes if inner is not x else self._dicts if isinstance(x, dict) else self._lists
            if inner is not None and depth:
                yield from self._walk(name, inner, seen, depth - 1, into)
            elif inner is not None:
                self.opaque = self.opaque or f"{name} ({type(x).__name__})"

    def _attributes_of(self, name: str, x: object) -> dict[Any, Any] | None:
        """Return the attributes of an object that a module holds; None for tensors, functions and our own objects."""
        x = x.__self__ if isinstance(x, MethodType) else x
        is_ours = type(x).__module__.startswith("lightning_cp")
        if is_ours or isinstance(x, (Tensor, *PLAIN, *_CODE)) or (isinstance(x, nn.Module) and x in self._modules):
            return None
        if isinstance(x, partial):
            return {"func": x.func, "args": x.args, "keywords": x.keywords}
        attributes: dict[Any, Any] | None = getattr(x, "__dict__", None)
        has_slots = any(vars(kind).get("__slots__") for kind in type(x).__mro__)
        if attributes is None or has_slots or isinstance(x, nn.Module):
            self.opaque = self.opaque or f"{name} ({type(x).__name__})"
        return attributes


def _held_functions(kind: type) -> Iterator[object]:
    """Yield the functions of a class, and what they hold in closures (the functions under their decorators)."""
    for value in vars(kind).values():
        function = getattr(value, "__func__", value)
        yield function
        for cell in getattr(function, "__closure__", None) or ():
            with suppress(ValueError):  # empty
                yield cell.cell_contents


def _has_hooks(module: nn.Module) -> bool:
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(not isinstance(getattr(hook, "__self__", None), EngineHook) for hook in hooks)


def compared(value: Any) -> Hashable:
    """Return what is compared of a value. The values in a container are compared one by one."""
    if isinstance(value, PLAIN):
        return type(value), repr(value) if isinstance(value, (float, complex)) else value  # 0.0 and -0.0, and NaN
    return (type(value), len(value)) if isinstance(value, _CONTAINERS) else id(value)


def _is_ours(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_lightning_cp")
