"""Check that a parallel model still consists of the objects and functions that the plan was installed on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from operator import is_, itemgetter
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from lightning_cp.engine.attention.attention_calls import methods_called
from lightning_cp.engine.forwards import decorated_function, own_forward
from lightning_cp.engine.rules.paths import submodule, unwrapped
from lightning_cp.engine.rules.rules import Rules

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_MODULES = itemgetter("_modules")
_STRUCTURES: WeakValueDictionary[str, Structure] = WeakValueDictionary()  # traced code passes names, not objects
_NUMBERS = count()


class Structure:
    """The modules of a model, the functions of classes, and the processors and forwards of planned ones, by identity.

    `is_unchanged` compares them before each forward, because hooks are on the modules that the plan was installed on. A
    new wrapper around a planned module or its forward counts as a change. `_parts` leaves wrappers out: only if it
    differs is the plan installed again. Objects that modules call are not compared: the attention scope holds for all
    code that runs inside a module.

    torch.compile traces only the comparison of planned modules and of the functions of classes. It also guards on the
    class and the forward of every module in the graph. If one of these guards fails, torch.compile traces again,
    and compares all modules at that time.
    """

    def __init__(self, model: nn.Module, rules: Rules) -> None:
        self._entries: list[tuple[dict[str, Any], str, object]] = []  # attributes of an object, a name, the value
        self._counts: list[tuple[dict[str, Any], int]] = []  # children of a module
        self._add_planned(model, rules)
        modules = list(model.modules())
        planned = list(dict.fromkeys(submodule(model, path) for path in _planned_paths(rules)))
        self._watched = [x for x in modules if x._modules or x in planned]
        self._attributes = [module.__dict__ for module in self._watched]
        self._parents = [x.__dict__ for x in modules if x._modules or isinstance(x, _CONTAINERS)]  # empty lists too
        self._children = [dict(attributes["_modules"]) for attributes in self._parents]
        self._processors = [(where, where["processor"]) for module in modules for where in _holding_processor(module)]
        self._objects: list[object] = [*planned, *(processor for _, processor in self._processors)]
        self._kinds = [type(x) for x in self._objects]
        kinds = dict.fromkeys([*map(type, modules), *self._kinds])
        self._functions = [x for kind in kinds for x in _functions(kind)]
        self._holders: list[dict[str, Any]] = []  # attributes of modules and wrappers with a forward
        self._names: list[str] = []
        self._values: list[object] = []
        for module in planned:
            if module is not model:  # `Installed.install` replaces the model's forward later
                self._add_forward(module)
        self._parts = list(_parts(model, planned))
        self._name = f"structure {next(_NUMBERS)}"  # an int that changes would become dynamic in a graph
        _STRUCTURES[self._name] = self

    def is_unchanged(self) -> bool:
        """Return True if everything is unchanged. torch.compile can trace this."""
        if not torch.compiler.is_compiling():
            return self.is_unchanged_eagerly()
        for attributes, name, value in self._entries:
            if attributes.get(name) is not value:
                return False
        for children, number in self._counts:
            if len(children) != number:
                return False
        for kind, name, function in self._functions:
            if getattr(kind, name, None) is not function:
                return False
        is_unchanged: bool = _is_unchanged_at_trace_time(self._name)
        return is_unchanged

    def is_unchanged_eagerly(self) -> bool:
        """Return True if everything is unchanged, outside of tracing. Loops over all modules run in C, for speed."""
        if not self.has_functions():
            return False
        for attributes, processor in self._processors:
            if attributes.get("processor") is not processor:
                return False
        if not all(map(is_, map(vars, self._watched), self._attributes)):  # `module.__dict__ = {...}`
            return False
        if list(map(_MODULES, self._parents)) != self._children or list(map(type, self._objects)) != self._kinds:
            return False
        return all(map(is_, map(dict.get, self._holders, self._names), self._values))

    def has_functions(self) -> bool:
        """Return True if all classes have the same functions, which torch.compile does not guard on."""
        return all(getattr(kind, name, None) is function for kind, name, function in self._functions)

    def has_parts_of(self, other: Structure) -> bool:
        """Return True if both hold the same modules, processors and functions, apart from wrappers."""
        same = len(self._parts) == len(other._parts)
        return same and all(a is b for a, b in zip(self._parts, other._parts, strict=True))

    def _add_planned(self, model: nn.Module, rules: Rules) -> None:
        blocks = {path for rule in rules.arguments if rule.is_block for path in rule.paths}
        for path in _planned_paths(rules):
            for parent, name, child in _steps(model, path):
                self._entries.append((parent._modules, name, child))
                self._counts.append((unwrapped(child)._modules, len(unwrapped(child)._modules)))
        for path in sorted({*blocks, *rules.attention} - {""}):
            module = submodule(model, path)
            self._entries.append((module.__dict__, "forward", module.__dict__.get("forward")))
            self._entries += [(where, "processor", where["processor"]) for where in _holding_processor(module)]
        self._entries = list({(id(x), name): (x, name, value) for x, name, value in self._entries}.values())
        self._counts = list({id(x): (x, n) for x, n in self._counts}.values())

    def _add_forward(self, module: nn.Module) -> None:
        slot = own_forward(module)
        slots = [(module.__dict__, "forward")]
        if slot.holder is not module or slot.name != "forward":
            slots.append((slot.holder.__dict__, slot.name))
        for attributes, name in slots:
            self._holders.append(attributes)
            self._names.append(name)
            self._values.append(attributes.get(name))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_unchanged_at_trace_time(name: str) -> bool:
    """Compare everything at trace time. The result is a constant of the graph, without guards."""
    structure = _STRUCTURES.get(name)
    return structure is not None and structure.is_unchanged_eagerly()


def _parts(model: nn.Module, planned: list[nn.Module]) -> Iterator[object]:
    """Yield all modules but wrappers, their processors, and the functions that run when planned ones are called."""
    for module in model.modules():
        if unwrapped(module) is not module:
            continue
        yield module
        for where in _holding_processor(module):
            yield where["processor"]
            yield from (function for _, _, function in _functions(type(where["processor"])))
    for module in planned:
        yield None if module is model else decorated_function(module)
    for kind in dict.fromkeys(map(type, map(unwrapped, model.modules()))):
        yield from (function for _, _, function in _functions(kind))


def _functions(kind: type) -> Iterator[tuple[type, str, object]]:
    """Yield the class, name and function of each method that a call of an object of this class runs."""
    for name in methods_called(kind):
        function = getattr(kind, name, None)
        if function is getattr(kind, name, None):  # not for descriptors that return a new object each time
            yield kind, name, function


def _holding_processor(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the attribute dict of a module, or its dict of children, if it holds a processor."""
    attributes: dict[str, Any]
    for attributes in (module.__dict__, module._modules):
        if "processor" in attributes:
            yield attributes


def _planned_paths(rules: Rules) -> list[str]:
    """List the paths of all modules that a plan names, without the model itself."""
    paths = {path for arguments in rules.arguments for path in arguments.paths}
    paths |= {
        *rules.attention,
        *rules.scopes,
        *rules.unplanned,
        *(x.path for x in rules.outputs),
        *(x.path for x in rules.embeddings),
        *(x.path for x in rules.halos),
    }
    return sorted(paths - {""})


def _steps(model: nn.Module, path: str) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Walk from a model down to `path`: yield each parent, the name of its child, and the child as registered."""
    parent = unwrapped(model)
    for atom in path.split("."):
        children: Any = parent._modules
        name = str(len(children) + int(atom)) if atom.startswith("-") else atom
        if name not in children:  # an alias: `submodule` finds it
            child = submodule(parent, atom)
        else:
            child = children[name]
            yield parent, name, child
        parent = unwrapped(child)
