"""Base class of the engine's hooks, their removal, and the check for refused arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor, nn

from lightning_cp.errors import ShapeError


class EngineHook:
    """Base class of the engine's hook objects; `remove_hooks` finds hooks by it.

    A deep copy of a model keeps the hooks of its original until its first forward, which replaces them.
    """

    def __deepcopy__(self, memo: object) -> Self:
        return self


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


def refuse(refused: Mapping[str, str], given: Mapping[str, Any], how: str = "context-parallel") -> None:
    """Check that arguments which must be left out are not given.

    Args:
        refused: reason for each refused argument, by name; "argument.key" is an entry, attribute
            or item of an argument, with further keys for those of that.
        given: arguments by name.
        how: how the model is computed, for the error.
    Raises: ShapeError: a refused argument is given and not None.
    """
    for name, reason in refused.items():
        argument, *keys = name.split(".")
        value = given.get(argument)
        for key in keys:
            if isinstance(value, (list, tuple)):
                value = value[int(key)] if int(key) < len(value) else None
            else:
                value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
        if value is not None:
            shown = f"a {type(value).__name__}" if isinstance(value, (Tensor, list, tuple, dict)) else repr(value)
            raise ShapeError(f"{name}={shown} cannot be used {how} ({reason}): leave it out")
