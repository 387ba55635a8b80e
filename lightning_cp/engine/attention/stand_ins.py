"""Stand-ins for functions of PyTorch and diffusers: attention, the choice of its blocks, dropout, recomputation,
gradients.

They are installed while a parallel model exists. Each calls the original function unless a scope is set (`scope`), so
other models and plain functions are not changed. Nothing else is replaced: any code that runs inside a planned module
is followed, in helper objects, partials and decorators too. Compiled code is also followed where it holds an original
function from before (in a closure or as a default argument, for example); eager code is checked (`MissedCalls`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, update_wrapper, wraps
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.attention.flex_attention as flex_module
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lightning_cp.compat.compiler import trace_as_before, trace_into
from lightning_cp.compat.torch_names import (
    function_modes,
    get_unwrapped,
    in_backward,
    is_functorch_wrapped_tensor,
    is_traceable_wrapper_subclass,
    script_as,
)
from lightning_cp.config import ContextParallelConfig
from lightning_cp.engine.attention.chosen_blocks import CHOOSERS, CHOOSING
from lightning_cp.engine.attention.dropout import drop
from lightning_cp.engine.attention.masks import attend_here, call_flex
from lightning_cp.engine.attention.replay import RECOMPUTING
from lightning_cp.engine.attention.scope import SCOPE, Scope, without_scope
from lightning_cp.engine.peers.checksum import version_of
from lightning_cp.errors import InterceptionError

SDPA, DISPATCH, FLEX = "scaled_dot_product_attention", "dispatch_attention_fn", "flex_attention"
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_DISPATCH_MODULE = "diffusers.models.attention_dispatch"
_SKIP = "AttentionScoreSkipFunctionMode"  # mode set by diffusers' guiders: attention then returns `value`
_KEPT = ("torch.", "lightning_cp.")  # modules that keep the functions which they hold under names of their own

_Function = Callable[..., Any]

ORIGINALS: dict[str, _Function] = {}  # attention functions under the installed stand-ins, by name
_STAND_INS: dict[int, _Function] = {}  # by ID of the original function; kept, so that compiled code stays valid
_UNDER: dict[int, _Function] = {}  # by ID of the stand-in: its original function
_TRACED: dict[_Function, _Function] = {}  # the same, by original function
_USERS: WeakSet[Any] = WeakSet()
SHARED_SAMPLES: WeakSet[nn.Module] = WeakSet()  # set up by a strategy; each rank's gradients are a part
_AVERAGING: list[bool] = []  # not empty in a strategy's backward


def install_stand_ins(user: object) -> None:
    """Install all stand-ins, also where other code holds the functions under names of its own.

    Args: user: a parallel model's state, until `release_stand_ins` is called with it or it is deleted.
    """
    _USERS.add(user)
    if are_installed():
        return
    for module, name in _functions():
        function = getattr(module, name)
        _add(module.__name__, name, function)
        if name in (SDPA, DISPATCH):
            ORIGINALS[name] = original_of(function)
    _exchange_in_modules(_STAND_INS)
    trace_into(_TRACED)


def _add(module: str, name: str, function: _Function) -> _Function | None:
    """Return the stand-in for a function, made once; None if the function is one."""
    if id(function) not in _STAND_INS and id(function) not in _UNDER:
        stand_in = _stand_in(name, function)
        stand_in.__module__ = module  # it is pickled by name, like the original
        script_as(stand_in, function)
        _TRACED[function] = stand_in
        _STAND_INS[id(function)], _UNDER[id(stand_in)] = stand_in, function
    return _STAND_INS.get(id(function))


def release_stand_ins(user: object) -> None:
    """Restore the original functions, unless other parallel models need the stand-ins."""
    _USERS.discard(user)
    if not _USERS:
        _exchange_in_modules(_UNDER)
        trace_as_before(_TRACED)


def are_installed() -> bool:
    """Return True if each function is a stand-in. (They may be replaced, and diffusers may be imported later.)"""
    for module, name in _functions():
        original = _UNDER.get(id(getattr(module, name)))
        if original is None or (name in (SDPA, DISPATCH) and ORIGINALS.get(name) is not original):
            return False
    trace_into(_TRACED)  # dynamo may be imported later
    return True


def hold_stand_ins(container: dict[Any, Any] | list[Any]) -> None:
    """Exchange original functions in a dict (the attributes of an object, for example) or list for their stand-ins."""
    _exchange(container, _STAND_INS)


def hold_originals(container: dict[Any, Any] | list[Any]) -> None:
    """Undo `hold_stand_ins`."""
    _exchange(container, _UNDER)


def original_of(function: _Function) -> _Function:
    """Return the function under a stand-in; return other functions unchanged."""
    return _UNDER.get(id(function), function)


def is_attention(function: object) -> bool:
    """Return True for the functions that compute attention, and for their stand-ins."""
    function = _UNDER.get(id(function), function)
    if function is F.scaled_dot_product_attention or any(function is x for x in ORIGINALS.values()):
        return True
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", None)
    return (module, name) == (_DISPATCH_MODULE, DISPATCH) or is_flex(function)


def is_flex(function: object) -> bool:
    """Return True for torch's `flex_attention`, compiled or not, and for its stand-ins."""
    return (
        isinstance(function, FunctionType) and function.__name__ == FLEX and function.__module__ == flex_module.__name__
    )


def _functions() -> Iterator[tuple[ModuleType, str]]:
    yield F, SDPA
    yield flex_module, FLEX
    dispatch = sys.modules.get(_DISPATCH_MODULE)
    if hasattr(dispatch, DISPATCH):  # else it is being imported
        assert dispatch is not None
        yield dispatch, DISPATCH
    for path, name in CHOOSERS.items():
        if hasattr(sys.modules.get(path), name):
            yield sys.modules[path], name
    for name in _DROPOUTS:
        yield F, name
        if hasattr(torch, name):
            yield torch, name
    for name in RECOMPUTING:
        yield torch.utils.checkpoint, name
    yield torch.autograd, "grad"
    yield torch.autograd, "backward"


def _exchange_in_modules(table: Mapping[int, _Function]) -> None:
    owners = {id(module.__dict__) for module, _ in _functions()}
    for name, module in list(sys.modules.items()):
        attributes = getattr(module, "__dict__", None)
        if isinstance(attributes, dict) and (id(attributes) in owners or not f"{name}.".startswith(_KEPT)):
            _exchange(attributes, table)


def _exchange(container: Any, table: Mapping[int, _Function]) -> None:
    for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
        other = table.get(id(value))
        if other is None and table is _STAND_INS and is_flex(value):
            other = _add(flex_module.__name__, FLEX, value)  # one that the user has compiled
        if other is not None:
            container[key] = other


class _OfBuiltin:
    """Stand-in for a C function: like one, it is not bound to an object whose class has it as an attribute."""

    __name__: str

    def __init__(self, function: _Function) -> None:
        update_wrapper(self, function)
        self.__func__ = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(*args, **kwargs)

    def __reduce__(self) -> str:
        return self.__name__


def _stand_in(name: str, original: _Function) -> _Function:
    makers: dict[str, Callable[[_Function], _Function]] = {
        SDPA: _sdpa,
        DISPATCH: _dispatch,
        FLEX: _flex,
        "grad": partial(_without_weights, 1),
        "backward": partial(_without_weights, 5),
        **RECOMPUTING,
        **CHOOSING,
    }
    stand_in = makers[name](original) if name in makers else _dropout(name, original)
    return _OfBuiltin(stand_in) if inspect.isbuiltin(original) else stand_in


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


def _flex(original: _Function) -> _Function:
    @wraps(original, updated=())  # without the attributes by which dynamo recognises a compiled function
    def flex_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        scope = SCOPE.get()
        if scope is not None and scope.attention is not None:
            return scope.attention.flex(original, query, key, value, *args, **kwargs)
        mask = args[1] if len(args) > 1 else kwargs.get("block_mask")
        if scope is None or mask is None:
            return original(query, key, value, *args, **kwargs)
        return call_flex(partial(attend_here, scope.session), query, key, value, *args, **kwargs)

    return flex_attention


def _dropout(name: str, original: _Function) -> _Function:
    @wraps(original)
    def dropout(*args: Any, **kwargs: Any) -> Any:
        scope = SCOPE.get()
        if scope is None or not scope.drops:
            return original(*args, **kwargs)
        return without_scope(drop, name, original, scope.session, *args, **kwargs)  # a mode calls the stand-in again

    return dropout


def _without_weights(position: int, original: _Function) -> _Function:
    """Args: position: index of the argument `inputs`."""

    @wraps(original)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        values = list(args)
        holder: Any = values if len(args) > position else kwargs
        key = position if holder is values else "inputs"
        if holder is values or key in kwargs:
            if isinstance(holder[key], Iterator):  # the check would use it up
                holder[key] = list(holder[key])
            _refuse_weights(holder[key])
        before = _unaveraged_gradients()
        result = original(*values, **kwargs)
        changed = next((name for name, x in _unaveraged_gradients().items() if x != before.get(name)), None)
        if changed is not None:
            raise ValueError(
                f"this backward has left this rank's part of a gradient in {changed.removeprefix('module.')}.grad, "
                "because several ranks share each sample: use self.manual_backward(loss) in a LightningModule, which "
                "averages gradients over the ranks (fabric.backward(loss) with Fabric)"
            )
        return result

    return gradient


def _refuse_weights(inputs: Any) -> None:
    """Check the inputs of a gradient. `torch.func` and `torch.autograd.functional` pass views of weights.

    Raises: ValueError: weights of which each rank has a part.
    """
    if not SHARED_SAMPLES or inputs is None or torch.compiler.is_compiling() or in_backward():
        return
    tensors = list(map(_tensor_of, inputs_of(inputs)))
    named = (pair for module in SHARED_SAMPLES for pair in module.named_parameters())
    names = {_storage_of(x): name.removeprefix("module.") for name, x in named if x.numel() and not x.is_meta}
    for x in tensors:
        if isinstance(x, DTensor) or (isinstance(x, Tensor) and _storage_of(x) in names):
            raise ValueError(
                "this would compute this rank's part of the gradient of "
                f"{names.get(_storage_of(x), 'a weight')}, because several ranks share each sample: use "
                "strategy.grad(outputs, inputs, ...), with the arguments of torch.autograd.grad, which returns the "
                "gradient of one process on every rank (fabric.strategy.grad, or self.trainer.strategy.grad in a "
                "LightningModule)"
            )


@contextmanager
def averaged_backward() -> Iterator[None]:
    """Allow a backward into the weights of DDP modules: a strategy has prepared their reduction."""
    _AVERAGING.append(True)
    try:
        yield
    finally:
        _AVERAGING.pop()


def _unaveraged_gradients() -> dict[str, Any]:
    """Return what changes with a gradient of a DDP module, by name; nothing where gradients are averaged."""
    if not SHARED_SAMPLES or _AVERAGING or torch.compiler.is_compiling() or in_backward():
        return {}
    modules = (x for x in SHARED_SAMPLES if isinstance(x, DistributedDataParallel))  # FSDP2 reduces in its own hooks
    named = (pair for module in modules for pair in module.named_parameters())
    return {name: (id(x.grad), version_of(x.grad)) for name, x in named if x.grad is not None}


def inputs_of(inputs: Any) -> list[Any]:
    """Return the inputs of `torch.autograd.grad` as a list."""
    if isinstance(inputs, (Tensor, GradientEdge)):
        return [inputs]
    return list(inputs.values() if isinstance(inputs, Mapping) else inputs)


def _tensor_of(x: Any) -> Any:
    """Return the tensor of an edge in a graph, if it is a leaf; and the one inside of the tensors of `torch.func`."""
    x = getattr(getattr(x, "node", None), "variable", x)
    while isinstance(x, Tensor) and is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def _storage_of(x: Tensor) -> int:
    """Return the address that views of a tensor share; for sharded and quantised weights, the object's."""
    return id(x) if is_traceable_wrapper_subclass(x) else x.untyped_storage().data_ptr()


def weight_of(x: Any) -> nn.Parameter | None:
    """Return the weight that an input of `torch.autograd.grad` is, or of which it is the edge in a graph, or None."""
    x = _tensor_of(x)
    return x if isinstance(x, nn.Parameter) else None


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
