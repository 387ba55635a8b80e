"""Compile plans in diffusers' format (`_cp_plan`) to rules; kinds of attention are derived from token counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_cp.engine.attention.attention_calls import attends, check_reachable, hides_processor
from lightning_cp.engine.rules.paths import arguments_of, expand
from lightning_cp.engine.rules.rules import Arguments, Outputs, Rules
from lightning_cp.errors import PlanError
from lightning_cp.plans import Spec, Split


def from_diffusers(module: nn.Module, plan: Mapping[str, Any]) -> Rules:
    arguments: list[Arguments] = []
    outputs: list[Outputs] = []
    for pattern, entry in plan.items():
        if not isinstance(pattern, str):
            raise PlanError(f"the plan has the key {pattern!r}: a key must be the path of a module as a str")
        if isinstance(entry, (Mapping, list, tuple)) and not entry:
            raise PlanError(f"plan entry {pattern!r} is empty: leave it out, or say what to split or gather")
        for path in expand(module, pattern):
            if isinstance(entry, Mapping):
                inputs = {
                    name: _to_spec(x, pattern, gathers=False) for name, x in entry.items() if isinstance(name, str)
                }
                if inputs:
                    arguments.append(arguments_of(module, (path,), inputs, always=True))
                indexed = {i: _to_spec(x, pattern, gathers=False) for i, x in entry.items() if isinstance(i, int)}
                if any(not getattr(entry[i], "split_output", False) for i in indexed):
                    raise PlanError(
                        f"plan entry {pattern!r}: an integer key splits an output and needs split_output=True"
                    )
                if indexed:
                    spec = tuple(indexed.get(i) for i in range(max(indexed) + 1))
                    outputs.append(Outputs(path, spec, gathers=False, always=True))
            elif isinstance(entry, (list, tuple)):
                spec = tuple(None if x is None else _to_spec(x, pattern, gathers=True) for x in entry)
                outputs.append(Outputs(path, spec, gathers=True, always=True))
            else:
                outputs.append(Outputs(path, (_to_spec(entry, pattern, gathers=True),), gathers=True, always=True))
    if not any(rule.gathers for rule in outputs):
        raise PlanError("the plan gathers nothing, so the output would be a shard: add a ContextParallelOutput")
    attention = {name: None for name, inner in module.named_modules() if attends(inner)}
    for name, inner in module.named_modules():
        check_reachable(inner, name)
    if not attention:
        raise PlanError(
            f"{type(module).__name__} makes no attention call that could be intercepted: it must go through "
            "diffusers' dispatch_attention_fn or F.scaled_dot_product_attention"
        )
    not_followed = tuple(path for path in attention if hides_processor(module.get_submodule(path)))
    return Rules(tuple(arguments), tuple(outputs), attention, "", {}, {}, not_followed=not_followed)


def _to_spec(entry: Any, pattern: str, *, gathers: bool) -> Spec:
    """Convert an entry of diffusers' format to a spec without modalities."""
    if isinstance(entry, (list, tuple)):
        return tuple(_to_spec(x, pattern, gathers=gathers) for x in entry)
    kind, expected = type(entry), "ContextParallelOutput" if gathers else "ContextParallelInput"
    if kind.__module__.split(".")[0] == "diffusers" and kind.__name__ == expected:
        return Split(entry.gather_dim if gathers else entry.split_dim, (), entry.expected_dims)
    if isinstance(entry, Split):
        return entry
    raise PlanError(f"plan entry {pattern!r} holds a {kind.__name__}, expected a {expected}")
