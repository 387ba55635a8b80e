"""How `torch.compile` treats our code: private names of dynamo and inductor, and the process-wide options that we need.

The options hold for everything that the process compiles afterwards. They cannot be limited to one model: the user
calls `torch.compile`, and inductor reads its options only after it has traced our operators. Nothing is imported or set
before the first use, so that a process that compiles nothing keeps PyTorch's defaults.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from lightning_cp.compat.versions import private_names

with private_names("torch"):
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

_GRAPHS = 64  # of one function; PyTorch's own limit is 8


def keep_order_of_attentions() -> None:
    """Set `torch._inductor.config.reorder_for_peak_memory = False`: no reordering of independent attentions by size.

    Called while an attention is traced. Ranks with uneven shards would otherwise call independent attentions in
    different orders, so that their collectives would not match. Registering an ordered effect does not prevent that.
    """
    config = imported_config("inductor")
    if config is not None:
        config.reorder_for_peak_memory = False  # type: ignore[attr-defined]


def compile_blocks_whole() -> None:
    """Set `torch._dynamo.config.optimize_ddp = False`: no split of graphs in a DDP module at gradient buckets.

    Called by selective activation checkpointing. Dynamo cannot split a selectively checkpointed block, and each block
    already has a separate graph.
    """
    config = imported_config("dynamo")
    if config is not None and config.optimize_ddp:  # every block calls this: write only once
        config.optimize_ddp = False  # type: ignore[attr-defined]


def allow_graphs_of_lengths() -> None:
    """Raise `torch._dynamo.config.recompile_limit` to 64, for many numbers of tokens.

    Called before each forward of a parallel model. Equal blocks share their graphs, but without dynamic shapes, each
    number of tokens needs its own. After PyTorch's limit of 8, blocks would run eager, or fail with `fullgraph=True`.
    """
    config = imported_config("dynamo")
    if config is not None and config.recompile_limit < _GRAPHS:
        config.recompile_limit = _GRAPHS  # type: ignore[attr-defined]


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude `function` from dynamo, also if dynamo compiles single frames after a graph break."""
    if not dynamo_is_imported():
        return function
    disabled: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


def skip_frames_of(method: Any) -> None:
    """Exclude calls of a method, and all calls inside them, from dynamo. It still traces them inside of compiled code.

    (`torch.compiler.disable` would break the graph there.)
    """
    skip = _FrameAction.SKIP
    set_code_exec_strategy(method.__func__.__code__, _FrameExecStrategy(skip, skip))


def allow_dynamic(x: torch.Tensor, dim: int) -> None:
    """Let torch.compile treat the size of a dim as dynamic, unless the compiled code needs it to be static."""
    if dynamo_is_imported():
        torch._dynamo.maybe_mark_dynamic(x, dim)


def keep_static(x: torch.Tensor, dim: int) -> None:
    """Let torch.compile make the size of a dim a constant."""
    torch._dynamo.mark_static(x, dim)


def dynamo_is_imported() -> bool:
    """Return True if dynamo is imported, so that something may be compiled. The import takes seconds."""
    return "torch._dynamo" in sys.modules


def is_allowed_in_graph(kind: type) -> bool:
    """Return True if `torch._dynamo.allow_in_graph` was called with a class, as diffusers does with LTX and Mochi."""
    with private_names("torch"):
        from torch._dynamo.trace_rules import is_callable_allowed
    return bool(is_callable_allowed(kind))


def trace_into(stand_ins: Mapping[Any, Any]) -> None:
    """Let dynamo trace stand-ins for torch's functions, also in the place of the original, where code holds that.

    Dynamo puts torch's functions into graphs as they are. It looks them up by name when it first traces something.
    Functions that were compiled before do not know the stand-ins, so they are compiled again.

    Args: stand_ins: by original function.
    """
    rules, are_new = _rules(), False
    for original, stand_in in stand_ins.items() if rules else ():
        rule = rules.pop(stand_in, None) or rules.get(original)
        if rule is not None and not hasattr(rule, "before"):
            rules[original], are_new = _traced_as(getattr(stand_in, "__func__", stand_in), rule), True
    if are_new:
        torch.compiler.reset()


def trace_as_before(originals: Iterable[Any]) -> None:
    """Undo `trace_into`."""
    rules = _rules()
    for original in originals:
        if hasattr(rules.get(original), "before"):
            rules[original] = rules[original].before


def _rules() -> dict[Any, Any]:
    """Return how dynamo traces torch's functions; nothing if dynamo is not imported."""
    if not dynamo_is_imported():
        return {}
    with private_names("torch"):
        from torch._dynamo.trace_rules import get_torch_obj_rule_map
    rules: dict[Any, Any] = get_torch_obj_rule_map()
    return rules


def _traced_as(stand_in: Any, rule: Any) -> Any:
    """Return dynamo's rule for a function that is traced as its stand-in. The stand-in's own calls are as before."""

    class Traced(rule):  # type: ignore[misc]
        before = rule

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            if tx.f_code is stand_in.__code__:
                return super().call_function(tx, args, kwargs)
            return type(self).build(tx, stand_in).call_function(tx, args, kwargs)

    return Traced


def imported_config(compiler: str) -> ModuleType | None:
    """Return the options of `compiler` ("dynamo" or "inductor"); None if it is not imported."""
    return sys.modules.get(f"torch._{compiler}.config")


def flex_operators() -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """Return PyTorch's operators of flex attention, forward and backward; None: this version has it elsewhere.

    Call it only to run on a GPU: it loads the compiler.
    """
    try:
        module = import_module("torch._higher_order_ops.flex_attention")
    except ImportError:
        return None, None
    return getattr(module, "flex_attention", None), getattr(module, "flex_attention_backward", None)
