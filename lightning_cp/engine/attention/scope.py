"""The attention scope: the planned attention that runs in this thread.

Hooks on the modules of parallel models set scopes (`scopes`); stand-ins for the functions of PyTorch and diffusers
read them (`stand_ins`). Other models and plain functions run without a scope.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_cp.compat.torch_names import in_backward
from lightning_cp.engine.session import Session


class ScopedAttention(Protocol):
    """Attention in a scope, with the arguments of diffusers' dispatcher and of PyTorch's function."""

    def dispatch(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute attention; tensors are [b, s, h, d]."""

    def sdpa(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute attention; tensors are [b, h, s, d]."""

    def flex(
        self, original: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute `flex_attention`, or call the original function; tensors are [b, h, s, d]."""


@dataclass(eq=False)
class Scope:
    """Attention and dropout of some modules of a parallel model. Modules of a kind share one object.

    Attributes:
        attention: None: the original functions (modules that the plan marks LOCAL).
        drops: True if dropout masks differ between ranks: the modules get shards.
    """

    session: Session
    attention: ScopedAttention | None
    drops: bool

    def __deepcopy__(self, memo: object) -> Scope:
        return self


class _Current(threading.local):
    """The scope of this thread.

    Attributes:
        current: None outside of parallel models.
        entry: in activation recomputation by other code than PyTorch's: the module that is recomputed, and `current`
            and `entry` before it.
    """

    def __init__(self) -> None:  # each thread calls it
        self.current: Scope | None = None
        self.entry: Any = None

    def get(self) -> Scope | None:
        """Return the scope. One that an interrupt (Ctrl-C) has left in a recomputation is dropped."""
        scope = self.current
        if torch.compiler.is_compiling() or self.entry is None or scope is None:
            return scope
        if scope.session.call is not None and not in_backward():
            scope = self.current = self.entry = None
        return scope


SCOPE = _Current()


def without_scope(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function without a scope: its attention and dropout calls run the original functions."""
    before, SCOPE.current = SCOPE.current, None
    try:
        return function(*args, **kwargs)
    finally:
        SCOPE.current = before
