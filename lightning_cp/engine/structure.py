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
from lightning_cp.engine.forwards import own_forward
from lightning_cp.engine.model_plan import ModelPlan
from lightning_cp.engine.paths import class_of, submodule, unwrapped, without_adapters
from lightning_cp.errors import PlanError

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_MODULES = itemgetter("_modules")
_STRUCTURES: WeakValueDictionary[str, Structure] = WeakValueDictionary()  # traced code passes names, not objects
_NUMBERS = count()


class Structure:
    """Fingerprint of a model: children, processors, forwards of planned modules, classes and their functions.

    `is_unchanged` compares it by identity before each forward, because hooks are on the modules that the plan was
    installed on. If it differs, the plan is installed again. Objects that modules call are not compared: the attention
    scope holds for all code that runs inside a module.

    torch.compile traces only the comparison of planned modules, of processors and of the functions of classes. It also
    guards on the class and the forward of every module in the graph. If one of these guards fails, torch.compile traces
    again, and compares all modules at that time.

    Attributes:
        planned: for each path in the plan, its module without wrappers and adapters, and its class. If they differ, the
            model was rebuilt by hand.
    """

    def __init__(self, model: nn.Module, model_plan: ModelPlan) -> None:
        modules, by_path = list(model.modules()), {path: submodule(model, path) for path in _planned_paths(model_plan)}
        named = {path: without_adapters(module) for path, module in by_path.items() if path not in model_plan.unplanned}
        self.planned = {path: (x, class_of(x)) for path, x in named.items()}
        processors = [(where, "processor") for module in modules for where in _holding_processor(module)]
        cells = [*(cell for path in by_path for cell in _steps(model, path)), *processors]
        # Not the model's own forward: `Installed.install` replaces it later.
        cells += [cell for module in dict.fromkeys(by_path.values()) if module is not model for cell in _slots(module)]
        unique = {(id(holder), name): (holder, name) for holder, name in cells}.values()
        self._cells = [(holder, name, holder.get(name)) for holder, name in unique]
        self._holders, self._names, self._values = map(list, zip(*self._cells, strict=True))
        planned = dict.fromkeys(by_path.values())
        self._watched = [x for x in modules if x._modules or isinstance(x, _CONTAINERS) or x in planned]
        self._attributes = list(map(vars, self._watched))
        self._children = [dict(attributes["_modules"]) for attributes in self._attributes]
        self._objects = [*planned, *(where[name] for where, name in processors)]
        self._kinds = [type(x) for x in self._objects]
        self._functions = [x for kind in dict.fromkeys([*map(type, modules), *self._kinds]) for x in _functions(kind)]
        self._name = f"structure {next(_NUMBERS)}"  # an int that changes would become dynamic in a graph
        _STRUCTURES[self._name] = self

    def is_unchanged(self) -> bool:
        """Return True if everything is unchanged. torch.compile can trace this."""
        if not torch.compiler.is_compiling():
            return self.is_unchanged_eagerly()
        for holder, name, value in self._cells:
            if holder.get(name) is not value:
                return False
        for kind, name, function in self._functions:
            if getattr(kind, name, None) is not function:
                return False
        is_unchanged: bool = _is_unchanged_at_trace_time(self._name)
        return is_unchanged

    def is_unchanged_eagerly(self) -> bool:
        """Return True if everything is unchanged, outside of tracing. Loops over all modules run in C, for speed."""
        if not all(map(is_, map(vars, self._watched), self._attributes)):  # `module.__dict__ = {...}`
            return False
        if list(map(_MODULES, self._attributes)) != self._children or list(map(type, self._objects)) != self._kinds:
            return False
        return all(map(is_, map(dict.get, self._holders, self._names), self._values)) and self.has_functions()

    def has_functions(self) -> bool:
        """Return True if all classes have the same functions, which torch.compile does not guard on."""
        return all(getattr(kind, name, None) is function for kind, name, function in self._functions)

    def check_planned(self, before: Structure) -> None:
        """Check that the modules of before are still planned. Raises: PlanError, with the first that is not."""
        for path, (module, kind) in before.planned.items():
            now = self.planned.get(path)
            if now is None:
                raise PlanError(f"{path} is gone, or no longer attends")
            if now[0] is not module or now[1] is not kind:
                raise PlanError(f"{path} {'is another module' if now[0] is not module else 'has another class'}")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_unchanged_at_trace_time(name: str) -> bool:
    """Compare everything at trace time. The result is a constant of the graph, without guards."""
    structure = _STRUCTURES.get(name)
    return structure is not None and structure.is_unchanged_eagerly()


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


def _slots(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield where the forward of a module is stored: its attribute, and that of a wrapper for its own forward."""
    slot = own_forward(module)
    yield module.__dict__, "forward"
    yield slot.holder.__dict__, slot.name


def _planned_paths(model_plan: ModelPlan) -> list[str]:
    """List the paths of all modules that a plan names, without the model itself."""
    paths = {path for arguments in model_plan.arguments for path in arguments.paths}
    paths |= {
        *model_plan.attention,
        *model_plan.scopes,
        *model_plan.unplanned,
        *(x.path for x in model_plan.outputs),
        *(x.path for x in model_plan.embeddings),
        *(x.path for x in model_plan.halos),
    }
    return sorted(paths - {""})


def _steps(model: nn.Module, path: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Walk from a model down to `path`: yield the children of each parent, and the name of the next one."""
    parent = unwrapped(model)
    for atom in path.split("."):
        children: Any = parent._modules
        name = str(len(children) + int(atom)) if atom.startswith("-") else atom
        if name in children:  # else it is an alias: `submodule` finds it
            yield children, name
        parent = unwrapped(children[name]) if name in children else submodule(parent, atom)
