"""Check that a parallel model still consists of the objects and functions that the plan was installed on."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from itertools import count
from operator import is_, itemgetter
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from lightning_cp.engine.attention_patch import ATTRIBUTES, original_processor
from lightning_cp.engine.forwards import decorated_function, own_forward, own_function
from lightning_cp.engine.held import Attribute, functions_of, held_by, helpers_in, hidden_in, lists_in
from lightning_cp.engine.methods import ORIGINAL, called_on_first
from lightning_cp.engine.paths import submodule, unwrapped
from lightning_cp.engine.rules import Rules

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_MODULES = itemgetter("_modules")
_CALLS = ("forward", "__call__")
_FUNCTIONS = (types.FunctionType, staticmethod, classmethod)
_STRUCTURES: WeakValueDictionary[str, Structure] = WeakValueDictionary()  # traced code passes names, not objects
_NUMBERS = count()


class Structure:
    """All modules of a model, their classes, processors and forwards, by identity.

    `is_unchanged` compares them before each forward: 130 µs of CPU time for the 1275 modules of Flux (57 blocks).
    Forwards and attributes that may hold code take 50 µs of this. A new wrapper around a module or its forward counts
    as a change. `_parts` leaves wrappers out: only if it differs is the plan installed again.

    `__dict__` is compared for planned modules and modules with children.

    torch.compile traces only the comparison of planned modules and of the functions of classes. It also guards on the
    class and the forward of every module in the graph. If one of these guards fails, torch.compile traces again, and
    compares all modules at that time.

    Attributes:
        hidden: path of an attribute in a block that makes attention calls which are not replaced; "" if there is none.
    """

    def __init__(self, model: nn.Module, rules: Rules) -> None:
        self._entries: list[tuple[dict[str, Any], str, object]] = []  # attributes of an object, a name, the value
        self._counts: list[tuple[dict[str, Any], int]] = []  # children of a module
        self._add_planned(model, rules)
        modules = list(model.modules())
        planned = {id(submodule(model, path)) for path in _planned_paths(rules)}
        self._watched = [x for x in modules if x._modules or id(x) in planned]
        self._attributes = [module.__dict__ for module in self._watched]
        self._parents = [x.__dict__ for x in modules if x._modules or isinstance(x, _CONTAINERS)]  # empty lists too
        self._children = [dict(attributes["_modules"]) for attributes in self._parents]
        self._processors = [(where, where["processor"]) for module in modules for where in _holding_processor(module)]
        self._objects: list[object] = [*modules, *(processor for _, processor in self._processors)]
        self._kinds = [type(x) for x in self._objects]
        originals = {type(original_processor(processor)) for _, processor in self._processors}
        self._functions = [x for kind in dict.fromkeys([*self._kinds, *originals]) for x in _functions(kind)]
        held_by_module = {module: _held(module) for module in modules}
        held = [x for found in held_by_module.values() for x in found]
        self._lists = list(lists_in(held))
        self._items = [list(x) for x in self._lists]
        helpers = list(helpers_in(held))
        self._objects += helpers
        self._kinds += [type(x) for x in helpers]
        self._functions += [x for kind in dict.fromkeys(map(type, helpers)) for x in functions_of(kind)]
        self._holders: list[dict[Any, Any]] = []  # attributes of modules, processors, helpers and wrappers; tables
        self._names: list[Any] = []
        self._values: list[object] = []
        for module in modules:
            if module is not model:  # `Installed.install` replaces the model's forward later
                self._add_forward(module)
            for name in _method_names(module):
                self._add_attribute(module.__dict__, name)
        for attributes, name, _ in held:
            self._add_attribute(attributes, name)
        self._parts = list(_parts(model, held_by_module))
        self.hidden = next(_hidden(model, rules), "")
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
        for kind, name, function in self._functions:
            if getattr(kind, name, None) is not function:
                return False
        for attributes, processor in self._processors:
            if attributes.get("processor") is not processor:
                return False
        if not all(map(is_, map(vars, self._watched), self._attributes)):  # `module.__dict__ = {...}`
            return False
        if list(map(_MODULES, self._parents)) != self._children or list(map(type, self._objects)) != self._kinds:
            return False
        if not all(map(is_, map(dict.get, self._holders, self._names), self._values)):
            return False
        return all(len(x) == len(y) and all(map(is_, x, y)) for x, y in zip(self._lists, self._items))

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
        found = [(module.__dict__, "forward")]
        if slot.holder is not module or slot.name != "forward":
            found.append((slot.holder.__dict__, slot.name))
        for attributes, name in found:
            self._add_attribute(attributes, name)

    def _add_attribute(self, attributes: dict[Any, Any], name: Any) -> None:
        self._holders.append(attributes)
        self._names.append(name)
        self._values.append(attributes.get(name))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_unchanged_at_trace_time(name: str) -> bool:
    """Compare everything at trace time. The result is a constant of the graph, without guards."""
    structure = _STRUCTURES.get(name)
    return structure is not None and structure.is_unchanged_eagerly()


def _parts(model: nn.Module, held_by_module: Mapping[nn.Module, list[Attribute]]) -> Iterator[object]:
    """Yield all modules but wrappers, their processors, and the functions that run when these are called."""
    found: dict[type, list[object]] = {}

    def functions(kind: type) -> list[object]:
        if kind not in found:
            found[kind] = [function for _, _, function in _functions(kind)]
        return found[kind]

    for module in model.modules():
        if unwrapped(module) is not module:
            continue
        yield module
        yield None if module is model else decorated_function(module)
        yield from (module.__dict__.get(name) for name in _method_names(module))
        yield from functions(type(module))
        for where in _holding_processor(module):
            processor = where["processor"]
            yield processor
            for kind in (type(processor), type(original_processor(processor))):
                yield from functions(kind)
        held = held_by_module[module]
        yield from (value for _, _, value in held if value is not None)
        yield from (item for items in lists_in(held) for item in items)
        for kind in dict.fromkeys(map(type, helpers_in(held))):
            yield kind
            yield from (function for _, _, function in functions_of(kind))


def _held(module: nn.Module) -> list[Attribute]:
    """List the objects and functions in the attributes of a module and of its processor."""
    processors = [original_processor(where["processor"]) for where in _holding_processor(module)]
    return [x for owner in (module, *processors) if hasattr(owner, "__dict__") for x in _held_by(owner)]


def _held_by(owner: Any) -> list[Attribute]:
    is_module = isinstance(owner, nn.Module)
    calls = [own_function(owner)] if is_module else [getattr(type(owner), name, None) for name in _CALLS]
    return [x for call in calls for x in held_by(owner, call)]


def _functions(kind: type) -> Iterator[tuple[type, str, object]]:
    """Yield the class, name and function of each method that a call of an object of this class runs."""
    calls = [getattr(kind, name, None) for name in _CALLS]
    names = {name: None for call in calls for name, x in called_on_first(kind, call).methods.items() if x.of_class}
    made = [name for name, x in vars(kind).items() if isinstance(x, _FUNCTIONS)] if ORIGINAL in vars(kind) else []
    for name in dict.fromkeys([*_CALLS, *names, *made]):
        function = getattr(kind, name, None)
        if function is getattr(kind, name, None):  # not for descriptors that return a new object each time
            yield kind, name, function


def _method_names(module: nn.Module) -> list[str]:
    """List the methods and functions that a module's own forward calls on the module."""
    called = called_on_first(module, own_function(module)).methods
    return list(dict.fromkeys([*called, *module.__dict__.get(ATTRIBUTES, ())]))


def _holding_processor(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the attribute dict of a module, or its dict of children, if it holds a processor."""
    attributes: dict[str, Any]
    for attributes in (module.__dict__, module._modules):
        if "processor" in attributes:
            yield attributes


def _hidden(model: nn.Module, rules: Rules) -> Iterator[str]:
    """Yield the paths of attributes of modules in blocks that make attention calls which are not replaced."""
    inside = tuple(f"{path}." for path in rules.blocks)
    for path, module in model.named_modules():
        if not f"{path}.".startswith(inside or "") or path in rules.local:
            continue
        processors = [original_processor(where["processor"]) for where in _holding_processor(module)]
        for owner in (module, *(x for x in processors if hasattr(x, "__dict__"))):
            name = hidden_in(owner, _held_by(owner))
            if name is not None:
                yield f"{path}.{name}" if owner is module else f"{path}.processor.{name}"


def _planned_paths(rules: Rules) -> list[str]:
    """List the paths of all modules that a plan names, without the model itself."""
    paths = {path for arguments in rules.arguments for path in arguments.paths}
    paths |= {*rules.attention, *rules.unplanned, *(x.path for x in rules.outputs), *(x.path for x in rules.halos)}
    return sorted(paths - {""})


def _steps(model: nn.Module, path: str) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Walk from a model down to `path`: yield each parent, the name of its child, and the child as registered."""
    found = unwrapped(model)
    for atom in path.split("."):
        children: Any = found._modules
        name = str(len(children) + int(atom)) if atom.startswith("-") else atom
        if name not in children:  # an alias: `submodule` finds it
            child = submodule(found, atom)
        else:
            child = children[name]
            yield found, name, child
        found = unwrapped(child)
