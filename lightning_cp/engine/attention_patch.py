"""Replace the attention calls of one model instance by calls of the engine, without changing any other model.

A processor, or a module's forward, calls `dispatch_attention_fn` or `F.scaled_dot_product_attention`. The engine runs
the same code with other globals (see `rebinding`), in a copy of the processor that only this model uses.
"""

from __future__ import annotations

import copy
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.compat.torch_names import function_modes
from lightning_cp.engine.forwards import decorated_function, own_forward, own_function, put_forward, unbound
from lightning_cp.engine.methods import ORIGINAL
from lightning_cp.engine.rebinding import (
    OF_CLASS,
    SDPA,
    Replacements,
    attending_method,
    attention_by_super,
    calls_flex_attention,
    makes_attention_call,
    rebind,
    rebind_methods,
)
from lightning_cp.errors import InterceptionError, PlanError

_SKIP = "AttentionScoreSkipFunctionMode"  # mode set by diffusers' guiders: attention then returns `value`
ATTRIBUTES = "_lightning_cp_attributes"  # on a module: name -> (original or None: the class's, replacement)
_PROCESSOR = "_lightning_cp_processor"  # slot of the engine's processors: the processor that it replaces


class AttentionPatch:
    """Replace the attention calls of modules by calls of two functions: one object for all with equal `AttentionSpecs`.

    Modules with the same original function share the replaced function, and processors with the same original class
    share the subclass, so that compiled blocks share their code. If an original is replaced, both are created again.

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
        # (original class and functions) -> (subclass, its methods by name)
        self._classes: dict[tuple[object, ...], tuple[type, dict[str, Any]]] = {}
        # (original forward, True if the class defines it) -> replacement; None: only methods that it calls attend
        self._functions: dict[tuple[Callable[..., Any], bool], Callable[..., Any] | None] = {}
        self._methods: dict[object, Any] = {}  # replacements by function

    def intercept(self, module: nn.Module, *, mark: object) -> None:
        """Replace the attention calls of a module's forward and of its processor; `release` undoes it.

        Args: mark: config object that diffusers' processors pass as `parallel_config` in context-parallel calls.
        Raises: PlanError: a method of the engine's subclass of a processor was replaced.
        """
        processor: Any = getattr(module, "processor", None)
        if makes_attention_call(own_function(module), module):
            self._intercept_forward(module)
        computes = _with_attention_call(processor, module)
        if attending_method(computes) is not None:
            module.processor = _replacement_for(processor, self._class_of(computes, mark))

    def _intercept_forward(self, module: nn.Module) -> None:
        function, of_class = own_function(module), own_forward(module).get() is None
        replace_methods(module, self._replacements, self._methods)
        key = function, of_class
        if key not in self._functions:
            assert isinstance(function, types.FunctionType), f"{type(module).__name__} was found to attend"
            bound = rebind(function, self._replacements)
            if bound is not None:
                bound.__dict__.update({ORIGINAL: function, OF_CLASS: of_class})
            self._functions[key] = bound
        replaced = self._functions[key]
        if replaced is not None:  # else only its methods attend
            put_forward(module, replaced)

    def _class_of(self, processor: object, mark: object) -> type:
        """Make a subclass of a processor's class with replaced methods and functions."""
        kind, name = type(processor), attending_method(processor)
        assert name is not None, f"{kind.__name__} was found to attend"
        function, is_marked = getattr(kind, name), mark is not None and hasattr(processor, "_parallel_config")
        methods = rebind_methods(processor, function, self._replacements, self._methods)
        key = kind, function, is_marked, *((x.name, x.stored, x.of_class) for x, _ in methods.values())
        if key not in self._classes:
            bound = rebind(function, self._replacements)
            made: dict[str, Any] = {x.name: found for x, found in methods.values() if x.of_class}
            made |= {} if bound is None else {name: bound}
            attributes = {"__module__": kind.__module__, "__class__": _original_class_property(kind), ORIGINAL: kind}
            attributes |= {
                x.name: _stored_function(x.name, x.stored, found) for x, found in methods.values() if not x.of_class
            }
            attributes |= {"_parallel_config": property(lambda _: mark)} if is_marked else {}
            attributes |= {"__slots__": (_PROCESSOR,), "__copy__": _copy, "__deepcopy__": _deepcopy}
            self._classes[key] = type(kind.__name__, (kind,), {**made, **attributes}), made
        subclass, made = self._classes[key]
        for name, bound in made.items():
            if vars(subclass).get(name) is not bound:
                raise PlanError(
                    f"{kind.__name__}.{name} was replaced on type(processor), which is a subclass made by "
                    "lightning_cp: replace it on processor.__class__, or before apply_context_parallel"
                )
        return subclass


def _original_class_property(kind: type) -> property:
    """Make a property `__class__` that gives the original class, which diffusers' AttentionProcessorRegistry looks up.

    While torch.compile traces, it gives the subclass: dynamo looks attributes up in `__class__`, and would otherwise
    find the original methods instead of the replacements.
    """
    return property(lambda processor: type(processor) if torch.compiler.is_compiling() else kind)


def _replacement_for(processor: Any, kind: type) -> Any:
    replacement = _with_class(processor, kind)
    object.__setattr__(replacement, _PROCESSOR, processor)
    return replacement


def _copy(replacement: Any) -> Any:
    return _replacement_for(copy.copy(original_processor(replacement)), type(replacement))


def _deepcopy(replacement: Any, memo: dict[int, Any]) -> Any:
    return _replacement_for(copy.deepcopy(original_processor(replacement), memo), type(replacement))


def _with_class(processor: Any, kind: type) -> Any:
    """Make an object of another class that shares all attributes with a processor."""
    made: Any = object.__new__(kind)
    if hasattr(processor, "__dict__"):
        object.__setattr__(made, "__dict__", processor.__dict__)
    slots = {name for base in kind.__mro__ for name in _slots(base)} - {_PROCESSOR, "__dict__", "__weakref__"}
    for name in slots:
        if hasattr(processor, name):
            object.__setattr__(made, name, getattr(processor, name))
    return made


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _stored_function(name: str, original: object, replaced: object) -> property:
    """Make a property for a function that a processor stores as an attribute. Reading it gives the replacement."""

    def get(processor: Any) -> Any:
        if torch.compiler.is_compiling():  # dynamo cannot trace the comparison below; `Structure` has made it
            return replaced
        if name not in processor.__dict__:
            raise AttributeError(name)
        return replaced if processor.__dict__[name] is original else processor.__dict__[name]

    def put(processor: Any, value: object) -> None:
        processor.__dict__[name] = value

    def delete(processor: Any) -> None:
        del processor.__dict__[name]

    return property(get, put, delete)


def replace_methods(module: nn.Module, replacements: Replacements, made: dict[object, Any]) -> bool:
    """Replace attention (or dropout) calls in the methods that a module's forward calls; `release` undoes it.

    Args: made: replacements made so far, by function. Modules share them, so that compiled blocks share their code.
    Returns: True if there are any.
    """
    methods = rebind_methods(module, own_function(module), replacements, made)
    for name, (method, stored) in methods.items():
        found = stored.__get__(module, type(module)) if method.of_class else stored
        original = None if method.of_class else method.stored
        module.__dict__.setdefault(ATTRIBUTES, {})[name] = original, unbound(found)
        module.__dict__[name] = found
    return bool(methods)


def _unless_skipped(attend: Callable[..., Tensor], *, tokens: int) -> Callable[..., Tensor]:
    """Wrap `attend`: return the values if diffusers skips attention scores, without communication.

    Args: tokens: dim of the tokens in queries, keys and values.
    """

    def attend_unless_skipped(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        modes: list[object] = function_modes()  # type: ignore[no-untyped-call]
        if not any(type(mode).__name__ == _SKIP for mode in modes):
            return attend(query, key, value, *args, **kwargs)
        if query.shape[tokens] != value.shape[tokens]:
            raise InterceptionError(
                f"skip_attention_scores=True, but {query.shape[tokens]} queries attend to {value.shape[tokens]} keys "
                "here: values can only replace the result if both numbers are equal. Leave this layer out of the "
                "LayerSkipConfig"
            )
        return value

    return attend_unless_skipped


def exchange_processor(module: nn.Module, replacement: Any) -> None:
    """Set another processor on `module`; it stores the original for `release`."""
    replacement.__dict__[ORIGINAL] = module.processor
    module.processor = replacement


def original_processor(processor: Any) -> Any:
    """Return the processor that the engine's processor replaces; return other processors unchanged."""
    found = getattr(processor, _PROCESSOR, None)
    return getattr(processor, "__dict__", {}).get(ORIGINAL, processor) if found is None else found


def release(module: nn.Module) -> None:
    """Restore a module's own processor, methods and forward where the engine replaced them, also on deep copies."""
    replacement: Any = getattr(module, "processor", None)
    processor: Any = original_processor(replacement)
    if processor is not replacement:
        own = getattr(processor, "__dict__", {})
        if own is not replacement.__dict__ and isinstance(replacement, type(processor)):  # its `__dict__` was replaced
            own.update(replacement.__dict__)
        module.processor = processor
    elif ORIGINAL in vars(type(replacement)):  # created by type(module.processor)()
        module.processor = _with_class(replacement, vars(type(replacement))[ORIGINAL])
    for name, (stored, replaced) in module.__dict__.pop(ATTRIBUTES, {}).items():
        found = module.__dict__.get(name)
        if found is None or unbound(found) is not replaced:  # the user has changed it
            continue
        if stored is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = stored
    slot = own_forward(module)
    function = slot.get()
    original = None if function is None else original_of(function)
    if function is None or original is None:
        return
    if unbound(function).__dict__[OF_CLASS]:
        slot.clear(module)
    else:
        slot.put(types.MethodType(original, module) if isinstance(function, types.MethodType) else original)


def original_of(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the function that the engine's function replaces; None for other functions (such as decorators)."""
    attributes = getattr(unbound(function), "__dict__", {})
    return None if "__wrapped__" in attributes else attributes.get(ORIGINAL)


def is_stuck(module: nn.Module) -> bool:
    """Return True if a decorator is around the engine's forward, so that `release` cannot remove it."""
    undecorated = decorated_function(module)
    if undecorated is None or undecorated is own_forward(module).get():
        return False
    return original_of(undecorated) is not None


def attends(module: nn.Module) -> bool:
    """Return True if the module, or its processor, makes attention calls that can be replaced."""
    if attending_method(_with_attention_call(getattr(module, "processor", None), module)) is not None:
        return True
    return makes_attention_call(own_function(module), module)


def _with_attention_call(processor: Any, module: Any) -> Any:
    """Return a processor that computes the same as `processor` with an attention call; itself if there is no other.

    diffusers' `AttnProcessor` (`set_default_attn_processor` of PixArt) computes all scores as a tensor. Where `module`
    has neither a special scale nor norms of queries and keys, `AttnProcessor2_0` computes the same.
    """
    kind: Any = type(processor)
    if (kind.__module__, kind.__name__) != ("diffusers.models.attention_processor", "AttnProcessor"):
        return processor
    diffusers: Any = sys.modules[kind.__module__]
    if not isinstance(module, diffusers.Attention) or not is_defined_by(kind, kind.__call__):
        return processor
    has_norms = module.norm_q is not None or module.norm_k is not None
    is_same = module.scale == (module.inner_dim // module.heads) ** -0.5 and not has_norms
    return diffusers.AttnProcessor2_0() if is_same else processor


def check_reachable(module: nn.Module, path: str, *, may_call_flex: bool = False) -> None:
    """Check that the attention calls of a module's class and of its processor can be replaced.

    Args: may_call_flex: allow calls of `flex_attention`, because the plan refuses the arguments that lead to them.
    Raises: PlanError: it attends where calls cannot be replaced.
    """
    processor = getattr(module, "processor", None) if hasattr(module, "set_processor") else None
    own = own_function(module)
    methods = [vars(kind).get(name) for kind in type(processor).__mro__ for name in ("__call__", "forward")]
    if not may_call_flex and any(calls_flex_attention(function) for function in (own, *methods)):
        raise PlanError(
            f"{path} calls flex_attention. Its block masks and score functions cannot be split over ranks: it must "
            "call F.scaled_dot_product_attention with a bool or additive mask, or be LOCAL in the plan. If only "
            "certain arguments lead to this call, list them in the plan's `refused`"
        )
    _check_parents(own, module, f"{path}: {type(module).__name__}.forward")
    if processor is not None:
        _check_parents(type(processor).__call__, processor, f"{path}: {type(processor).__name__}")
    if processor is not None and not attends(module):
        raise PlanError(
            f"{path}.processor is a {type(processor).__name__}, which makes no attention call that could be "
            "intercepted: it must go through diffusers' dispatch_attention_fn or F.scaled_dot_product_attention. Set "
            "the processor that this class has by default (AttnProcessor2_0, for example)"
        )
    if makes_attention_call(type(module).__call__):
        raise PlanError(
            f"{path}: {type(module).__name__}.__call__ makes an attention call, which cannot be intercepted there: "
            "make it in forward"
        )
    if makes_attention_call(own, module) or own is type(module).forward:
        return
    if makes_attention_call(type(module).forward, type(module)):
        raise PlanError(
            f"{path}.forward was replaced, or decorated, on this instance of {type(module).__name__}, and its "
            "attention call can no longer be intercepted: decorate it with functools.wraps, after "
            "apply_context_parallel"
        )


def _check_parents(function: object, owner: object, name: str) -> None:
    method = attention_by_super(function, owner)
    if method is not None:
        raise PlanError(
            f"{name} makes an attention call in super().{method}, which cannot be intercepted there: call a method of "
            "another name on self, or copy the code of the parent class"
        )


def hides_processor(module: nn.Module) -> bool:
    """Return True if it is not known whether a module's forward calls its processor: it was replaced or decorated."""
    own = own_function(module)
    if not hasattr(module, "set_processor") or makes_attention_call(own, module):
        return False
    if own is type(module).forward:
        return not is_defined_by(type(module), own)
    return decorated_function(module) is not None


def is_defined_by(kind: type, function: Any) -> bool:
    """Return True if a function, without its decorators, was defined in the body of `kind` or of a parent class."""
    name = getattr(inspect.unwrap(function), "__qualname__", None)
    return name is None or name.rpartition(".")[0] in {base.__qualname__ for base in kind.__mro__}
