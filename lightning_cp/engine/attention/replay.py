"""Run functions that activation checkpointing recomputes in the scope and the `Call` of their forward."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn

from lightning_cp.compat.torch_names import autograd_functions, module_call_code, stores_recomputation
from lightning_cp.engine.attention.scope import SCOPE, Scope
from lightning_cp.engine.hook_base import EngineHook
from lightning_cp.engine.session import Call, Session
from lightning_cp.engine.sharding.convolutions import whole_embeddings
from lightning_cp.errors import InterceptionError


@dataclass(eq=False)
class Replay(EngineHook):
    """Function (a block, for example) passed to a checkpoint function. It runs as in its forward, also in backward.

    Attributes:
        call: the forward.
        scope: in which the function is called.
        is_split: the function is a block whose arguments are split already.
    """

    session: Session
    call: Call | None
    scope: Scope | None
    function: Callable[..., Any]
    is_split: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before, self.session.call = self.session.call, self.call
        outside, SCOPE.current = SCOPE.current, self.scope
        if self.is_split and self.call is not None:
            self.call.split_block = self.function
        try:
            return self.function(*args, **kwargs)
        finally:
            self.session.call, SCOPE.current = before, outside


def _recomputing_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a stand-in for the part of non-reentrant checkpointing that stores the function to recompute."""

    @wraps(original)
    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(in_scope(function), *args, **kwargs)

    return generator


_REENTRANT = "a reentrant checkpoint"  # it passes gradients of tensors only


def _recomputing_function(original: Any) -> Any:
    """Return a stand-in for the autograd function of reentrant checkpointing."""

    class CheckpointFunction(original):  # type: ignore[misc]
        @classmethod
        def apply(cls, function: Callable[..., Any], *args: Any) -> Any:
            run = in_scope(function)
            tensors = whole_embeddings(args, _REENTRANT)
            return original.apply(lambda *x: whole_embeddings(run(*x), _REENTRANT), *tensors)

    return CheckpointFunction


# By name in `torch.utils.checkpoint`, whose `checkpoint` uses them. It is not replaced, because dynamo looks for it.
RECOMPUTING: dict[str, Callable[[Any], Any]] = {
    stores_recomputation.__name__: _recomputing_generator,
    "CheckpointFunction": _recomputing_function,
}


def in_scope(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs in the scope and the `Call` of now, also in backward."""
    scope = SCOPE.get()
    return function if scope is None else Replay(scope.session, scope.session.call, scope, function)


def check_recomputation(call: Call) -> None:
    """Check that no autograd function is between this call and the planned module that makes it.

    Raises: InterceptionError: its backward may call the code again, without the scope.
    """
    if torch.compiler.is_compiling() or not call.has_grad or torch.is_grad_enabled():
        return
    functions = autograd_functions()
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not _is_planned(frame):
        if frame.f_code in functions:
            raise InterceptionError(
                f"attention or dropout on shards is computed inside of {functions[frame.f_code]}, a "
                "torch.autograd.Function that a block calls. If its backward recomputes it, the token counts of this "
                "forward are unknown then: use torch.utils.checkpoint.checkpoint for activation checkpointing"
            )
        frame = frame.f_back


def _is_planned(frame: types.FrameType) -> bool:
    """Return True for the call of a module with hooks of the engine, and for that of a `Replay`."""
    called = frame.f_locals.get("self")
    if isinstance(called, nn.Module) and frame.f_code is module_call_code:
        return any(isinstance(getattr(x, "__self__", None), EngineHook) for x in called._forward_hooks.values())
    return isinstance(called, EngineHook) and frame.f_code.co_name == "__call__"
