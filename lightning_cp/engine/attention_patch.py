"""Replace the attention calls of one model instance by calls of the engine, without changing any other model.

A processor, or a module's forward, calls `dispatch_attention_fn` or `F.scaled_dot_product_attention`. The engine runs
the same code with other globals (see `rebinding`), in a copy of the processor that only this model uses.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_cp.compat.torch_names import function_modes
from lightning_cp.engine.forwards import decorated_function, own_forward, own_function, put_forward, unbound
from lightning_cp.engine.rebinding import (
    OF_CLASS,
    ORIGINAL,
    SDPA,
    Replacements,
    attending_method,
    calls_flex_attention,
    makes_attention_call,
    rebind,
)
from lightning_cp.errors import InterceptionError, PlanError

_SKIP = "AttentionScoreSkipFunctionMode"  # diffusers': a guider asks for attention whose result is its values


class AttentionPatch:
    """Replaces the attention calls of modules by calls of two functions. There is one for each `AttentionSpecs`.

    Copies of processors of one class share a class, and modules of one class that attend in their own forward share a
    function, so that compiled blocks can share their code. Both are made anew if the function that they were made from
    is replaced, also on a class.

    Args:
        dispatch: called in place of diffusers' `dispatch_attention_fn`.
        sdpa: called in place of `F.scaled_dot_product_attention`.
        others: replacements of other functions in the same code (dropout).
    """

    def __init__(
        self, dispatch: Callable[..., Any], sdpa: Callable[..., Any], others: Replacements | None = None
    ) -> None:
        self._replacements: Replacements = {
            **(others or {}),
            "dispatch_attention_fn": _unless_skipped(dispatch, tokens=-3),
            SDPA: _unless_skipped(sdpa, tokens=-2),
        }
        self._classes: dict[tuple[type, object], tuple[type, str, object]] = {}  # ours, its method, the function there
        self._functions: dict[tuple[Callable[..., Any], bool], Callable[..., Any]] = {}

    def intercept(self, module: nn.Module, *, mark: object) -> None:
        """Reroute `module`, its processor and its own forward, whichever attend; `release` undoes it.

        Args: mark: what a diffusers processor passes as `parallel_config` where it wants context parallelism.
        Raises: PlanError: a method of our copy of a processor's class was replaced.
        """
        processor: Any = getattr(module, "processor", None)
        if makes_attention_call(own_function(module)):
            self._intercept_forward(module)
        if attending_method(processor) is None:
            return
        ours: Any = copy.copy(processor)
        ours.__class__ = self._class_of(type(processor))
        if mark is not None and hasattr(processor, "_parallel_config"):
            ours._parallel_config = mark
        exchange_processor(module, ours)

    def _intercept_forward(self, module: nn.Module) -> None:
        function, place = own_function(module), own_forward(module)
        key = function, place.get() is None
        if key not in self._functions:
            assert isinstance(function, types.FunctionType), f"{type(module).__name__} was found to attend"
            bound = rebind(function, self._replacements)
            assert bound is not None, f"{type(module).__name__} was found to attend"
            bound.__dict__.update({ORIGINAL: function, OF_CLASS: place.get() is None})
            self._functions[key] = bound
        put_forward(module, self._functions[key])

    def _class_of(self, kind: type) -> type:
        name = attending_method(kind)
        assert name is not None, f"{kind.__name__} was found to attend"
        key = kind, getattr(kind, name)
        if key not in self._classes:
            made = rebind(getattr(kind, name), self._replacements)
            # What a processor says its class is stays: diffusers' AttentionProcessorRegistry looks it up by that.
            ours = {name: made, "__module__": kind.__module__, "__class__": property(lambda _: kind), ORIGINAL: kind}
            self._classes[key] = type(kind.__name__, (kind,), ours), name, made
        ours_class, name, bound = self._classes[key]
        if vars(ours_class).get(name) is not bound:
            raise PlanError(
                f"{kind.__name__}.{name} was replaced on type(processor), which is a subclass made by lightning_cp: "
                "replace it on processor.__class__, or before apply_context_parallel"
            )
        return ours_class


def _unless_skipped(attend: Callable[..., Tensor], *, tokens: int) -> Callable[..., Tensor]:
    """`attend`, or the values where diffusers skips attention scores: each token's own, so nothing is exchanged.

    Args: tokens: the dim of queries, keys and values that counts them.
    """

    def attend_unless_skipped(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        modes: list[object] = function_modes()  # type: ignore[no-untyped-call]
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
    ours.__dict__[ORIGINAL] = module.processor
    module.processor = ours


def original_processor(processor: Any) -> Any:
    """Return the processor that one of ours replaces; any other unchanged."""
    return getattr(processor, "__dict__", {}).get(ORIGINAL, processor)


def release(module: nn.Module) -> None:
    """Restore a module's own processor and forward where an `AttentionPatch` replaced them, also on deep copies."""
    ours: Any = getattr(module, "processor", None)
    if ORIGINAL in getattr(ours, "__dict__", {}):
        theirs = ours.__dict__[ORIGINAL]
        if vars(type(ours)).get(ORIGINAL) is type(
            theirs
        ):  # what was set on ours meanwhile: a backend, an adapter's scale
            theirs.__dict__.update({k: x for k, x in ours.__dict__.items() if k not in (ORIGINAL, "_parallel_config")})
        module.processor = theirs
    elif ORIGINAL in vars(type(ours)):  # made anew, by type(module.processor)()
        object.__dict__["__class__"].__set__(ours, vars(type(ours))[ORIGINAL])
    place = own_forward(module)
    function = place.get()
    original = None if function is None else original_of(function)
    if function is None or original is None:
        return
    if unbound(function).__dict__[OF_CLASS]:
        place.clear(module)
    else:
        place.put(types.MethodType(original, module) if isinstance(function, types.MethodType) else original)


def original_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function that one of ours stands in for; None for one that is not ours (a decorator around it, say)."""
    attributes = getattr(unbound(function), "__dict__", {})
    return None if "__wrapped__" in attributes else attributes.get(ORIGINAL)


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
    own = own_function(module)
    methods = [vars(kind).get(name) for kind in type(processor).__mro__ for name in ("__call__", "forward")]
    if any(calls_flex_attention(function) for function in (own, *methods)):
        raise PlanError(
            f"{path} calls flex_attention, whose block masks and score functions cannot be split over ranks: it must "
            "call F.scaled_dot_product_attention with a bool or additive mask, or be local in the plan (LOCAL)"
        )
    if processor is not None and not attends(module):
        raise PlanError(
            f"{path}.processor is a {type(processor).__name__}, which makes no attention call that could be "
            "intercepted: it must go through diffusers' dispatch_attention_fn or F.scaled_dot_product_attention"
        )
    if makes_attention_call(type(module).__call__):
        raise PlanError(
            f"{path}: {type(module).__name__}.__call__ makes an attention call, which cannot be intercepted there: "
            "make it in forward"
        )
    if makes_attention_call(own) or (own is type(module).forward and is_defined_by(type(module), own)):
        return
    if own is not type(module).forward and makes_attention_call(type(module).forward):
        raise PlanError(
            f"{path}.forward was replaced, or decorated, on this instance of {type(module).__name__}, and its "
            "attention call can no longer be intercepted: decorate it with functools.wraps, after "
            "apply_context_parallel"
        )
    if processor is not None and (own is type(module).forward or decorated_function(module) is not None):
        where = "this class" if own is type(module).forward else f"this instance of {type(module).__name__}"
        raise PlanError(
            f"{path}.forward was replaced on {where} by a function that makes no attention call that could be "
            "intercepted: if it calls the original forward, make it with functools.wraps"
        )


def is_defined_by(kind: type, function: Any) -> bool:
    """Return True if a function, without its decorators, was defined in the body of `kind` or of a parent class."""
    name = getattr(inspect.unwrap(function), "__qualname__", None)
    return name is None or name.rpartition(".")[0] in {base.__qualname__ for base in kind.__mro__}
