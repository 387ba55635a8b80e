"""Find modules of a model by the paths and patterns in a plan."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_cp.engine.model_plan import Arguments
from lightning_cp.errors import PlanError
from lightning_cp.plans import Spec


def submodule(module: nn.Module, path: str) -> nn.Module:
    """Return the module at `path`; "-1" is the last item of a list. Raises: PlanError: there is no such module."""
    inner = module
    for i, atom in enumerate(path.split(".") if path else ()):
        last_of = (
            isinstance(inner, nn.ModuleList) and atom.lstrip("-").isdigit() and -len(inner) <= int(atom) < len(inner)
        )
        nested = inner[int(atom)] if last_of else getattr(inner, atom, None)  # type: ignore[index]
        if not isinstance(nested, nn.Module):
            at = ".".join(path.split(".")[:i]) or type(module).__name__
            raise PlanError(f"the plan names {path!r}, but {at} has no module {atom!r}")
        inner = nested
    return unwrapped(inner)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside activation-checkpointing and compiler wrappers."""
    for name in ("_checkpoint_wrapped_module", "_orig_mod"):
        inner = module._modules.get(name)
        if inner is not None:
            return unwrapped(inner)
    return module


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module without the subclass that FSDP2 creates."""
    original: Any = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    return original  # type: ignore[no-any-return]


def is_compiled(module: nn.Module) -> bool:
    """Return True if `torch.compile` was applied to this module, by `module.compile()` or as a wrapper around it."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def is_a(module: nn.Module, name: str) -> bool:
    """Return True if a module's class or a base class has this name: FSDP2 replaces the class by a subclass."""
    return any(kind.__name__ == name for kind in type(module).__mro__)


def without_adapters(module: nn.Module) -> nn.Module:
    """Return the base layer inside adapters (for example LoRA layers of peft)."""
    while isinstance(inner := module._modules.get("base_layer"), nn.Module):
        module = inner
    return module


def expand(module: nn.Module, pattern: str) -> list[str]:
    """List the paths that match a pattern; it may have one `*`, which matches every module of a list."""
    atoms = pattern.split(".")
    if atoms.count("*") > 1:
        raise PlanError(f"the plan names {pattern!r}: a pattern can have only one '*'")
    if "*" not in atoms:
        submodule(module, pattern)
        return [pattern]
    at = atoms.index("*")
    stack = submodule(module, ".".join(atoms[:at]))
    if not isinstance(stack, (nn.ModuleList, nn.ModuleDict)):
        raise PlanError(
            f"the plan names {pattern!r}, but '*' must match the items of a ModuleList or ModuleDict, got a "
            f"{type(stack).__name__}"
        )
    paths = [".".join([*atoms[:at], name, *atoms[at + 1 :]]) for name, _ in stack.named_children()]
    for path in paths:
        submodule(module, path)
    return paths


def expanded(module: nn.Module, table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """List the entries of a table by path, with patterns expanded."""
    return [(path, entry) for pattern, entry in table.items() for path in expand(module, pattern)]


def block_paths(module: nn.Module, pattern: str) -> tuple[str, ...]:
    """List the paths of the blocks that a pattern selects: "blocks" or "blocks[a:b]"."""
    stack, _, bounds = pattern.partition("[")
    blocks = submodule(module, stack)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        raise PlanError(
            f"the plan names {stack!r} as a list of blocks: it must be a ModuleList with blocks, got "
            f"{'an empty' if isinstance(blocks, nn.ModuleList) else 'a'} {type(blocks).__name__}"
        )
    first, _, last = bounds.rstrip("]").partition(":")
    start, stop = _bound(module, first, len(blocks), default=0), _bound(module, last, len(blocks), default=len(blocks))
    return tuple(f"{stack}.{i}" for i in range(start, stop))


def _bound(module: nn.Module, text: str, blocks: int, *, default: int) -> int:
    name = text.lstrip("-")
    if not name:
        return default
    value = int(name) if name.isdigit() else getattr(module, name, None)
    if not isinstance(value, int) or value > blocks:
        raise PlanError(
            f"the plan slices a list of {blocks} blocks at {text!r}, which must be an attribute of "
            f"{type(module).__name__}, an int of at most {blocks}"
        )
    return blocks - value if text.startswith("-") else value


def arguments_of(
    module: nn.Module,
    paths: tuple[str, ...],
    specs: Mapping[str, Spec],
    *,
    is_block: bool = False,
    gathers: bool = False,
    always: bool = False,
) -> Arguments:
    """Describe the arguments of some modules of one class. Raises: PlanError: their forward has no such argument."""
    first = submodule(module, paths[0])
    positions = {name: position(paths[0] or type(module).__name__, first, name) for name in specs}
    return Arguments(paths, dict(specs), positions, is_block, gathers, always)


def position(path: str, module: nn.Module, name: str) -> int:
    """Return the index of an argument in the module's forward; -1 if it is passed through `**kwargs`."""
    parameters = inspect.signature(type(without_adapters(module)).forward).parameters
    if name in parameters:
        return list(parameters).index(name) - 1
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return -1
    raise PlanError(
        f"the plan names the argument {name!r} of {path}, but {type(module).__name__}.forward takes "
        f"{', '.join(list(parameters)[1:])}"
    )
