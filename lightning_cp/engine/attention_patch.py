"""The seam: attention calls of one model instance, led through the engine without touching anyone else's.

A processor (or a module's forward) is code that finds `dispatch_attention_fn` or `F.scaled_dot_product_attention`
among its module's globals. The engine runs the same code with other globals, in a copy of the processor that belongs
to this model alone. Nothing global is patched, so other models, threads and replays are not concerned, and compilers
see plain functions.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

from lightning_cp.engine.forwards import decorated_function, own_forward, own_function, unbound
from lightning_cp.errors import InterceptionError, PlanError

_ORIGINAL = "_lightning_cp_original"  # what ours stands in for: a processor, or the function of a forward
_SDPA = "scaled_dot_product_attention"
_SKIP = "AttentionScoreSkipFunctionMode"  # diffusers': a guider asks for attention whose result is its values
_DEPTH = 3  # how far helper functions are followed

Replacements = dict[str, Callable[..., Any]]  # by name: dispatch_attention_fn, scaled_dot_product_attention


def rebind(function: types.FunctionType, replacements: Replacements, depth: int = _DEPTH) -> types.FunctionType | None:
    """`function` with its attention calls replaced, in itself and in helpers it calls; None if it makes none."""
    changed: dict[str, Any] = {}
    names = set(_names(function.__code__))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        replaced = _replace(value, names, replacements, depth)
        if replaced is not None:
            changed[name] = replaced
    if not changed:
        return None
    # Without __name__: a compiler would otherwise look the globals up in the module of that name.
    scope = {name: value for name, value in function.__globals__.items() if name != "__name__"} | changed
    bound = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound


def _replace(value: Any, names: set[str], replacements: Replacements, depth: int) -> Any:
    if value is F.scaled_dot_product_attention:
        return replacements[_SDPA]
    if isinstance(value, types.ModuleType) and value in (torch, nn, F):
        return _module_with(value, replacements[_SDPA]) if _SDPA in names else None
    if not isinstance(value, types.FunctionType):
        return None
    if value.__name__ == "dispatch_attention_fn" and value.__module__.startswith("diffusers."):
        return replacements["dispatch_attention_fn"]
    return rebind(value, replacements, depth - 1) if depth and not _of_torch(value) else None


def _of_torch(function: types.FunctionType) -> bool:
    return (function.__module__ or "").split(".")[0] == "torch"


def _module_with(module: types.ModuleType, attention: Callable[..., Any]) -> types.ModuleType:
    """A copy of torch, torch.nn or torch.nn.functional in which scaled_dot_product_attention is `attention`."""
    functional = types.ModuleType(F.__name__)
    functional.__dict__.update(F.__dict__, **{_SDPA: attention})
    if module is F:
        return functional
    modules = types.ModuleType(nn.__name__)
    modules.__dict__.update(nn.__dict__, functional=functional)
    if module is nn:
        return modules
    whole = types.ModuleType(torch.__name__)
    whole.__dict__.update(torch.__dict__, nn=modules)
    return whole


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


class AttentionPatch:
    """Leads the attention calls of modules through two functions. One for each way in which modules attend.

    Copies of processors share a class for each original class, so that compiled blocks can share their code; so do
    modules that attend in their own forward share its function.
    """

    def __init__(self, dispatch: Callable[..., Any], sdpa: Callable[..., Any]) -> None:
        self._replacements: Replacements = {
            "dispatch_attention_fn": _unless_skipped(dispatch, tokens=-3),
            _SDPA: _unless_skipped(sdpa, tokens=-2),
        }
        self._classes: dict[type, type] = {}
        self._functions: dict[Callable[..., Any], Callable[..., Any]] = {}

    def intercept(self, module: nn.Module, *, mark: object) -> None:
        """Reroute `module`; `release` undoes it.

        Args: mark: what a diffusers processor shall pass as `parallel_config` where it wants context parallelism.
        """
        processor: Any = getattr(module, "processor", None)
        if attending_method(processor) is None:
            self._intercept_forward(module)
            return
        ours: Any = copy.copy(processor)
        ours.__class__ = self._class_of(type(processor))
        if mark is not None and hasattr(processor, "_parallel_config"):
            ours._parallel_config = mark
        exchange_processor(module, ours)

    def _intercept_forward(self, module: nn.Module) -> None:
        function = own_function(module)
        if function not in self._functions:
            assert isinstance(function, types.FunctionType), f"{type(module).__name__} was found to attend"
            bound = rebind(function, self._replacements)
            assert bound is not None, f"{type(module).__name__} was found to attend"
            bound.__dict__[_ORIGINAL] = function
            self._functions[function] = bound
        place, ours = own_forward(module), self._functions[function]
        is_method = place.get() is None or isinstance(place.get(), types.MethodType)
        place.put(types.MethodType(ours, module) if is_method else ours)

    def _class_of(self, kind: type) -> type:
        if kind not in self._classes:
            name = attending_method(kind)
            assert name is not None, f"{kind.__name__} was found to attend"
            bound = rebind(getattr(kind, name), self._replacements)
            # What a processor says its class is stays: diffusers' AttentionProcessorRegistry looks it up by that.
            ours = {name: bound, "__module__": kind.__module__, "__class__": property(lambda _: kind), _ORIGINAL: kind}
            self._classes[kind] = type(kind.__name__, (kind,), ours)
        return self._classes[kind]


def _unless_skipped(attend: Callable[..., Tensor], *, tokens: int) -> Callable[..., Tensor]:
    """`attend`, or the values where diffusers skips attention scores: each token's own, so nothing is exchanged.

    Args: tokens: the dim of queries, keys and values that counts them.
    """

    def attend_unless_skipped(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        modes: list[object] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if not any(type(mode).__name__ == _SKIP for mode in modes):
            return attend(query, key, value, *args, **kwargs)
        if query.shape[tokens] != value.shape[tokens]:
            raise InterceptionError(
                f"skip_attention_scores=True, but {query.shape[tokens]} queries attend to {value.shape[tokens]} keys "
                "here, whose values cannot stand for the result: leave this layer out of the LayerSkipConfig"
            )
        return value

    return attend_unless_skipped


def exchange_processor(module: nn.Module, ours: Any) -> None:
    """Give `module` a processor in place of its own, which the new one keeps for `release`."""
    ours.__dict__[_ORIGINAL] = module.processor
    module.processor = ours


def release(module: nn.Module) -> None:
    """Restore a module's own processor and forward where an `AttentionPatch` replaced them, also on deep copies."""
    ours: Any = getattr(module, "processor", None)
    if _ORIGINAL in getattr(ours, "__dict__", {}):
        theirs = ours.__dict__[_ORIGINAL]
        if vars(type(ours)).get(_ORIGINAL) is type(
            theirs
        ):  # what was set on ours meanwhile: a backend, an adapter's scale
            theirs.__dict__.update({k: x for k, x in ours.__dict__.items() if k not in (_ORIGINAL, "_parallel_config")})
        module.processor = theirs
    elif _ORIGINAL in vars(type(ours)):  # made anew, by type(module.processor)()
        object.__dict__["__class__"].__set__(ours, vars(type(ours))[_ORIGINAL])
    place = own_forward(module)
    function = place.get()
    original = None if function is None else original_of(function)
    if original is None:
        return
    if original is type(module).forward:
        place.clear(module)
    else:
        place.put(types.MethodType(original, module) if isinstance(function, types.MethodType) else original)


def original_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function that one of ours stands in for; None for one that is not ours (a decorator around it, say)."""
    attributes = getattr(unbound(function), "__dict__", {})
    return None if "__wrapped__" in attributes else attributes.get(_ORIGINAL)


def is_stuck(module: nn.Module) -> bool:
    """Whether a forward of ours is beneath a decorator, so that `release` cannot take it off."""
    beneath = decorated_function(module)
    return beneath is not None and beneath is not own_forward(module).get() and original_of(beneath) is not None


def attends(module: nn.Module) -> bool:
    """Whether the module makes attention calls of its own that the seam can reach."""
    if attending_method(getattr(module, "processor", None)) is not None:
        return True
    return makes_attention_call(own_function(module))


def check_reachable(module: nn.Module, path: str) -> None:
    """Raise PlanError for a module that attends, by its class or its processor, where the seam cannot reach it."""
    processor = getattr(module, "processor", None) if hasattr(module, "set_processor") else None
    if processor is not None and not attends(module):
        raise PlanError(
            f"{path}.processor is a {type(processor).__name__}, which makes no attention call that could be "
            "intercepted: it must go through diffusers' dispatch_attention_fn or F.scaled_dot_product_attention"
        )
    if own_function(module) is type(module).forward or makes_attention_call(own_function(module)):
        return
    if makes_attention_call(type(module).forward):
        raise PlanError(
            f"{path}.forward was replaced, or decorated, on this instance of {type(module).__name__}, and its "
            "attention call can no longer be intercepted: decorate it with functools.wraps, after "
            "apply_context_parallel"
        )
    if processor is not None and decorated_function(module) is not None:
        raise PlanError(
            f"{path}.forward was replaced on this instance of {type(module).__name__} by a function that makes no "
            "attention call that could be intercepted: if it calls the original forward, make it with functools.wraps"
        )


def attending_method(thing: object) -> str | None:
    """Name of the method (of a class, or of an object's) that makes attention calls; None if there is none."""
    kind = thing if isinstance(thing, type) else type(thing)
    return next((name for name in ("__call__", "forward") if makes_attention_call(getattr(kind, name, None))), None)


def makes_attention_call(function: object) -> bool:
    """Whether a function makes attention calls that can be replaced."""
    nothing: Replacements = {"dispatch_attention_fn": _nothing, _SDPA: _nothing}
    if not isinstance(function, types.FunctionType) or _of_torch(function):
        return False
    return rebind(function, nothing) is not None


def _nothing(*_: object, **__: object) -> None:
    raise AssertionError("a trial replacement is never called")
