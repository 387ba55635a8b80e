"""Find out from the code of modules and processors whether they make attention calls.

The engine follows calls wherever they are made (see `scope`). Their code is read to check a plan before the model runs,
and to find the modules with hooks: activation checkpointing may recompute each of them alone.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

from torch import nn

from lightning_cp.engine.attention.stand_ins import DISPATCH, FLEX, SDPA, is_attention, is_flex, original_of
from lightning_cp.engine.forwards import decorated_function, own_function
from lightning_cp.errors import PlanError

_FOREIGN = ("torch.", "lightning_cp.engine.", "diffusers.models.attention_dispatch.")
_CALLS = ("__call__", "forward")
_DEPTH = 3  # how far functions that call others are followed


def makes_attention_call(function: object, owner: object = None) -> bool:
    """Return True if a function calls attention by name, itself or in functions that it calls by name.

    Args: owner: the object, or the class, that the function gets as its first argument; None: do not look at methods.
    """
    return any(is_attention(value) or {SDPA, DISPATCH, FLEX} & names for value, names in _reached(function, owner))


def hides_flex_attention(function: object) -> bool:
    """Return True if a function, or a helper that it calls, holds `flex_attention` where no stand-in can replace it."""
    held = (x for value, names in _reached(function, None) for x in _hidden(value, names))
    return any(is_flex(x) and original_of(x) is x for x in held)


def _hidden(function: Any, names: frozenset[str]) -> Iterator[Any]:
    """Yield what a function holds in its closure and defaults, and the functions in partials that it calls by name."""
    if not _is_followed(function):
        return
    yield from _in_cells(function)
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, partial):
            yield value.func


def _reached(function: object, owner: object) -> Iterator[tuple[Any, frozenset[str]]]:
    """Yield a function and all that it calls by name, each with the names in its code (none for a foreign function)."""
    left: list[tuple[Any, Any, int]] = [(function, owner, _DEPTH)]
    seen = set()
    value: Any
    while left:
        value, first, depth = left.pop()
        if isinstance(value, partial):
            value = value.func
        if isinstance(value, types.MethodType):
            value, first = value.__func__, value.__self__
        if (id(value), id(first)) in seen:
            continue
        seen.add((id(value), id(first)))
        if not _is_followed(value):
            yield value, frozenset()
            continue
        names = _names(value.__code__)
        yield value, names
        if depth > 0:
            left += [(value.__globals__[name], None, depth - 1) for name in names & value.__globals__.keys()]
            left += [(x, first, depth - 1) for x in _in_cells(value)]
            left += [(x, first, depth - 1) for x in _attributes(first, names)]


def _is_followed(value: Any) -> bool:
    is_known = isinstance(value, types.FunctionType) and not is_attention(value)
    return is_known and not f"{value.__module__ or ''}.".startswith(_FOREIGN)


@lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    nested = (_names(x) for x in code.co_consts if isinstance(x, types.CodeType))
    return frozenset(code.co_names).union(*nested)


def _in_cells(function: types.FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty
            continue


def _attributes(owner: Any, names: frozenset[str]) -> Iterator[object]:
    """Yield functions among the attributes of an object that have one of these names, and those of `super()`."""
    if owner is None:
        return
    kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    instance_attributes = {} if isinstance(owner, type) else getattr(owner, "__dict__", {})
    for name in names.difference(_CALLS):
        attribute = instance_attributes.get(name)
        if attribute is None:
            attribute = next((vars(kind)[name] for kind in kinds if name in vars(kind)), None)
        yield (
            getattr(attribute, "__func__", attribute)
            if isinstance(attribute, (staticmethod, classmethod))
            else attribute
        )
    if "super" in names:
        yield from (vars(kind).get(name) for kind in kinds for name in names)


def methods_called(kind: type) -> list[str]:
    """List the names of `forward` and `__call__` of a class, and of the methods that these call on the object."""
    methods: dict[str, None] = {}
    left = list(_CALLS)
    while left:
        name = left.pop()
        function = inspect.unwrap(x) if callable(x := getattr(kind, name, None)) else None
        if name in methods or not isinstance(function, types.FunctionType):
            continue
        methods[name] = None
        if not f"{function.__module__ or ''}.".startswith(_FOREIGN):
            left += [name for name in _names(function.__code__) if hasattr(kind, name)]
    return list(methods)


def attends(module: nn.Module) -> bool:
    """Return True if the code of a module's forward, or of its processor, makes attention calls."""
    return makes_attention_call(own_function(module), module) or _attends(attending_processor(module))


def _attends(processor: object) -> bool:
    kind = type(processor)
    return any(makes_attention_call(getattr(kind, name, None), processor) for name in _CALLS)


def attending_processor(module: Any) -> Any:
    """Return a module's processor, or one that computes the same with an attention call.

    diffusers' `AttnProcessor` (`set_default_attn_processor` of PixArt) computes all scores as a tensor. Where `module`
    has neither a special scale nor norms of queries and keys, `AttnProcessor2_0` computes the same.
    """
    processor: Any = getattr(module, "processor", None)
    kind: Any = type(processor)
    if (kind.__module__, kind.__name__) != ("diffusers.models.attention_processor", "AttnProcessor"):
        return processor
    diffusers: Any = sys.modules[kind.__module__]
    if not isinstance(module, diffusers.Attention) or not is_defined_by(kind, kind.__call__):
        return processor
    has_norms = module.norm_q is not None or module.norm_k is not None
    is_same = module.scale == (module.inner_dim // module.heads) ** -0.5 and not has_norms
    return diffusers.AttnProcessor2_0() if is_same else processor


def check_reachable(module: nn.Module, path: str) -> None:
    """Check that no attention of a module, or of its processor, is computed by other functions.

    Raises: PlanError: it is.
    """
    processor = getattr(module, "processor", None) if hasattr(module, "set_processor") else None
    forward = own_function(module)
    methods = [vars(kind).get(name) for kind in type(processor).__mro__ for name in _CALLS]
    if any(hides_flex_attention(function) for function in (forward, *methods)):
        raise PlanError(
            f"{path} holds flex_attention in a closure, a default argument or a partial, where it cannot be "
            "intercepted: call it by its name, or by that of a compiled flex_attention at the top of a file"
        )
    if processor is not None and not attends(module):
        raise PlanError(
            f"{path}.processor is a {type(processor).__name__}, which makes no attention call that could be "
            "intercepted: it must go through diffusers' dispatch_attention_fn or F.scaled_dot_product_attention. Set "
            "the processor that this class has by default (AttnProcessor2_0, for example)"
        )
    if makes_attention_call(forward, module) or forward is type(module).forward:
        return
    if makes_attention_call(type(module).forward, type(module)):
        raise PlanError(
            f"{path}.forward was replaced, or decorated, on this instance of {type(module).__name__}, and its code "
            "makes no attention call that could be intercepted: call the original forward, "
            "F.scaled_dot_product_attention or diffusers' dispatch_attention_fn in it"
        )


def hides_processor(module: nn.Module) -> bool:
    """Return True if it is not known whether a module's forward calls its processor: it was replaced or decorated."""
    forward = own_function(module)
    if not hasattr(module, "set_processor") or makes_attention_call(forward, module):
        return False
    if forward is type(module).forward:
        return not is_defined_by(type(module), forward)
    return decorated_function(module) is not None


def is_defined_by(kind: type, function: Any) -> bool:
    """Return True if a function, without its decorators, was defined in the body of `kind` or of a parent class."""
    name = getattr(inspect.unwrap(function), "__qualname__", None)
    return name is None or name.rpartition(".")[0] in {base.__qualname__ for base in kind.__mro__}
