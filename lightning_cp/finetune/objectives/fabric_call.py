"""Call a transformer that Fabric has set up, without rounding its arguments."""

from __future__ import annotations

from typing import Any

from lightning.fabric.wrappers import is_wrapped
from torch import nn


class _Arguments:
    """Keyword arguments that Fabric's precision plugins do not look into: no dict, list or dataclass."""

    __slots__ = ("kwargs",)

    def __init__(self, kwargs: dict[str, Any]) -> None:
        self.kwargs = kwargs


def call_unrounded(transformer: nn.Module, arguments: dict[str, Any]) -> Any:
    """Return `transformer(**arguments)`, with every argument in the dtype that it has here.

    `fabric.setup(transformer)` returns a module that casts all floating-point arguments to the precision's dtype. Times
    would be rounded: bfloat16 has about 500 values for 1000 times. The arguments therefore pass it in one opaque
    object, and a hook of the module that was set up takes them out.
    """
    if not is_wrapped(transformer):
        return transformer(**arguments)
    set_up: Any = transformer.module
    handle = set_up.register_forward_pre_hook(_unpack, with_kwargs=True, prepend=True)
    try:
        return transformer(_Arguments(arguments))
    finally:
        handle.remove()


def _unpack(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    assert len(args) == 1, "the object is passed on as it is"
    return (), args[0].kwargs
