"""The attention scope: the planned attention that runs in this thread, and the functions that read it.

While a parallel model exists, a stand-in is installed for each function of PyTorch and diffusers that computes
attention or dropout. It calls the original function unless a scope is set. Hooks on the modules of parallel models set
scopes (`scope_hooks`), so other models and plain functions are not changed. Nothing else is replaced: any code that
runs inside a planned module is followed, in helper objects, partials and decorators too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp.compat.torch_names import function_modes, in_backward, trace_into
from lightning_cp.config import ContextParallelConfig
from lightning_cp.engine.dropout import drop
from lightning_cp.engine.session import Session
from lightning_cp.errors import InterceptionError

SDPA, DISPATCH = "scaled_dot_product_attention", "dispatch_attention_fn"
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_DISPATCH_MODULE = "diffusers.models.attention_dispatch"
_SKIP = "AttentionScoreSkipFunctionMode"  # mode set by diffusers' guiders: attention then returns `value`
_KEPT = ("torch.", "lightning_cp.")  # modules that keep the functions which they hold under names of their own

_Function = Callable[..., Any]


class ScopedAttention(Protocol):
    """Attention in a scope, with the arguments of diffusers' dispatcher and of PyTorch's function."""

    def dispatch(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute attention; tensors are [b, s, h, d]."""

    def sdpa(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute attention; tensors are [b, h, s, d]."""


@dataclass(eq=False)
class Scope:
    """What attention and dropout compute in some modules of a parallel model. Modules of a kind share one object.

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
        entry: in activation recomputation: the module that is recomputed.
        has_grad: True if gradients were enabled where the innermost planned module was called.
    """

    def __init__(self) -> None:  # each thread calls it
        self.current: Scope | None = None
        self.entry: Any = None
        self.has_grad = False

    def get(self) -> Scope | None:
        """Return the scope. One that an interrupt (Ctrl-C) has left in a recomputation is dropped."""
        scope = self.current
        if torch.compiler.is_compiling() or self.entry is None or scope is None:
            return scope
        if scope.session.call is not None and not in_backward():
            scope = self.current = self.entry = None
        return scope


SCOPE = _Current()
ORIGINALS: dict[str, _Function] = {}  # attention functions under the installed stand-ins, by name
_STAND_INS: dict[int, _Function] = {}  # by ID of the original function; kept, so that compiled code stays valid
_UNDER: dict[int, _Function] = {}  # by ID of the stand-in: its original function
_USERS: WeakSet[Any] = WeakSet()


def without_scope(function: _Function, *args: Any, **kwargs: Any) -> Any:
    """Call a function whose own attention and dropout calls must run as they are."""
    before, SCOPE.current = SCOPE.current, None
    try:
        return function(*args, **kwargs)
    finally:
        SCOPE.current = before


def install_stand_ins(user: object) -> None:
    """Install all stand-ins, also where other code holds the functions under names of its own.

    Args: user: a parallel model's state, until `release_stand_ins` is called with it or it is deleted.
    """
    _USERS.add(user)
    if are_installed():
        return
    for module, name in _functions():
        function = getattr(module, name)
        if id(function) not in _STAND_INS and id(function) not in _UNDER:
            stand_in = _stand_in(name, function)
            stand_in.__module__ = module.__name__  # it is pickled by name, like the original
            _STAND_INS[id(function)], _UNDER[id(stand_in)] = stand_in, function
        if name in (SDPA, DISPATCH):
            ORIGINALS[name] = original_of(function)
    _exchange_in_modules(_STAND_INS)
    trace_into(_STAND_INS.values())


def release_stand_ins(user: object) -> None:
    """Restore the original functions, unless other parallel models need the stand-ins."""
    _USERS.discard(user)
    if not _USERS:
        _exchange_in_modules(_UNDER)


def are_installed() -> bool:
    """Return True if each function is a stand-in. (They may be replaced, and diffusers may be imported later.)"""
    trace_into(_STAND_INS.values())
    for module, name in _functions():
        original = _UNDER.get(id(getattr(module, name)))
        if original is None or (name in (SDPA, DISPATCH) and ORIGINALS.get(name) is not original):
            return False
    return True


def hold_stand_ins(held: dict[Any, Any] | list[Any]) -> None:
    """Exchange original functions in a dict (the attributes of an object, for example) or list for their stand-ins."""
    _exchange(held, _STAND_INS)


def hold_originals(held: dict[Any, Any] | list[Any]) -> None:
    """Undo `hold_stand_ins`."""
    _exchange(held, _UNDER)


def original_of(function: _Function) -> _Function:
    """Return the function under a stand-in; return other functions unchanged."""
    return _UNDER.get(id(function), function)


def is_attention(function: object) -> bool:
    """Return True for the functions that compute attention, and for their stand-ins."""
    function = _UNDER.get(id(function), function)
    if function is F.scaled_dot_product_attention or any(function is x for x in ORIGINALS.values()):
        return True
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", None)
    return (module, name) == (_DISPATCH_MODULE, DISPATCH)


def _functions() -> Iterator[tuple[ModuleType, str]]:
    """Yield the module and the name of each function that has a stand-in."""
    yield F, SDPA
    dispatch = sys.modules.get(_DISPATCH_MODULE)
    if hasattr(dispatch, DISPATCH):  # else it is being imported
        assert dispatch is not None
        yield dispatch, DISPATCH
    for name in _DROPOUTS:
        yield F, name
        if hasattr(torch, name):
            yield torch, name


def _exchange_in_modules(table: Mapping[int, _Function]) -> None:
    """Exchange functions in all imported modules."""
    owners = {id(module.__dict__) for module, _ in _functions()}
    for name, module in list(sys.modules.items()):
        attributes = getattr(module, "__dict__", None)
        if isinstance(attributes, dict) and (id(attributes) in owners or not f"{name}.".startswith(_KEPT)):
            _exchange(attributes, table)


def _exchange(held: Any, table: Mapping[int, _Function]) -> None:
    for key, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
        other = table.get(id(value))
        if other is not None:
            held[key] = other


def _stand_in(name: str, original: _Function) -> _Function:
    return {SDPA: _sdpa, DISPATCH: _dispatch}[name](original) if name in (SDPA, DISPATCH) else _dropout(name, original)


def _sdpa(original: _Function) -> _Function:
    @wraps(original)
    def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        scope = SCOPE.get()
        if _skips_scores() and _is_skipped(query, value, -2, scope):
            return value
        if scope is None or scope.attention is None:
            return original(query, key, value, *args, **kwargs)
        return scope.attention.sdpa(query, key, value, *args, **kwargs)

    return scaled_dot_product_attention


def _dispatch(original: _Function) -> _Function:
    @wraps(original)
    def dispatch_attention_fn(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        scope = SCOPE.get()
        if scope is None or scope.attention is None:
            if isinstance(kwargs.get("parallel_config"), ContextParallelConfig):  # of a processor that models share
                kwargs["parallel_config"] = None
            return original(query, key, value, *args, **kwargs)
        if _skips_scores() and _is_skipped(query, value, -3, scope):
            return value
        return scope.attention.dispatch(query, key, value, *args, **kwargs)

    return dispatch_attention_fn


def _dropout(name: str, original: _Function) -> _Function:
    @wraps(original)
    def dropout(*args: Any, **kwargs: Any) -> Any:
        scope = SCOPE.get()
        if scope is None or not scope.drops:
            return original(*args, **kwargs)
        return without_scope(drop, name, original, scope.session, *args, **kwargs)  # a mode calls the stand-in again

    return dropout


def _skips_scores() -> bool:
    """Return True inside of diffusers' mode that skips attention scores. (It looks for the function by identity.)"""
    modes: list[object] = function_modes()  # type: ignore[no-untyped-call]
    return any(type(mode).__name__ == _SKIP for mode in modes)


def _is_skipped(query: Tensor, value: Tensor, tokens: int, scope: Scope | None) -> bool:
    """Return True if the values replace attention, without communication: as many queries as keys, as in diffusers.

    Args: tokens: dim of the tokens in queries, keys and values.
    Raises: InterceptionError: the numbers differ, in a scope with attention across ranks.
    """
    is_equal = query.shape[tokens] == value.shape[tokens]
    if scope is None or scope.attention is None:
        return is_equal
    if not is_equal:
        raise InterceptionError(
            f"skip_attention_scores=True, but {query.shape[tokens]} queries attend to {value.shape[tokens]} keys "
            "here: values can only replace the result if both numbers are equal. Leave this layer out of the "
            "LayerSkipConfig"
        )
    scope.session.current().intercepted = True
    return True
