"""What all our hooks have in common: how they are found again, and what they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_cp.errors import ShapeError


class EngineHook:
    """Base of our hook objects, by which they are found and taken off.

    A deep copy of a model keeps the hooks of its original until its first forward, which puts new ones in their place.
    """

    def __deepcopy__(self, memo: object) -> Any:
        return self


def remove_hooks(module: nn.Module) -> None:
    """Take our hooks off one module, whichever session they belong to. Hooks of others stay."""
    for hooks, details in (
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
        (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
    ):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), EngineHook):
                del hooks[key]
                for detail in details:
                    detail.pop(key, None)


def refuse(refused: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """Raises: ShapeError: an argument, or ("argument.key") an entry or attribute of one, that must be left out."""
    for name, reason in refused.items():
        argument, _, key = name.partition(".")
        value = given.get(argument)
        if key:
            value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
        if value is not None:
            shown = f"a {type(value).__name__}" if isinstance(value, (Tensor, list, tuple, dict)) else repr(value)
            raise ShapeError(f"{name}={shown} cannot be used context-parallel ({reason}): leave it out")
