"""Base class of the engine's hooks, how they are added and removed, and the check for refused arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import Tensor, nn

from lightning_cp.compat.compiler import skip_frames_of
from lightning_cp.errors import ShapeError

Hook = Callable[..., Any]


class EngineHook:
    """Base class of the engine's hook objects; `remove_hooks` finds hooks by it.

    A deep copy of a model keeps the hooks of its original until its first forward, which replaces them.
    """

    def __deepcopy__(self, memo: object) -> Self:
        return self


def add_hooks(
    module: nn.Module, *, before: Hook | None = None, after: Hook | None = None, always: bool = False
) -> None:
    """Add methods of an `EngineHook` around a module's forward, so that equal blocks share one compiled graph.

    torch.compile guards on the IDs of hooks, which torch counts over all modules. These IDs are counted for each
    module, and are negative: equal blocks have the same, and they differ from those of torch.

    The hooks of a module that is compiled alone run eagerly. (torch.compile does not trace `nn.Module.__call__` then,
    but it would compile each hook, and guard on the state that it finds.) In a module inside of compiled code, they are
    traced.

    Args:
        before: gets (module, args, kwargs), and returns both, changed, or None.
        after: gets (module, args, output), and returns the output, changed, or None.
        always: call `after` also if the forward has failed, with None as output.
    """
    if before is not None:
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
        _renumber(handle.id, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
        skip_frames_of(before)
    if after is not None:
        handle = module.register_forward_hook(after, always_call=always)
        _renumber(handle.id, module._forward_hooks, module._forward_hooks_always_called)
        skip_frames_of(after)


def _renumber(number: int, hooks: dict[int, Hook], *details: dict[int, Any]) -> None:
    """Give the last of a module's hooks the next negative ID."""
    first = min([0, *hooks]) - 1
    for table in (hooks, *details):
        if number in table:
            table[first] = table.pop(number)


def remove_hooks(module: nn.Module) -> None:
    """Remove the engine's hooks of all sessions from one module. Hooks of other libraries stay."""
    for hooks, details in (
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
        (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
    ):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), EngineHook):
                del hooks[key]
                for detail in details:
                    detail.pop(key, None)


def refuse_arguments(refused: Mapping[str, str], arguments: Mapping[str, Any], how: str = "context-parallel") -> None:
    """Check that arguments which must be left out are not given.

    Args:
        refused: reason for each refused argument, by name; "argument.key" is an entry, attribute
            or item of an argument, with further keys for those of that.
        arguments: arguments by name.
        how: how the model is computed, for the error.
    Raises: ShapeError: a refused argument is given and not None.
    """
    for name, reason in refused.items():
        argument, *keys = name.split(".")
        value = arguments.get(argument)
        for key in keys:
            if isinstance(value, (list, tuple)):
                value = value[int(key)] if int(key) < len(value) else None
            else:
                value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
        if value is not None:
            shown = f"a {type(value).__name__}" if isinstance(value, (Tensor, list, tuple, dict)) else repr(value)
            raise ShapeError(f"{name}={shown} cannot be used {how} ({reason}): leave it out")
