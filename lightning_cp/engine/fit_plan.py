"""Fit a plan to one model, and check it against the model, before the model is changed."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from itertools import starmap
from typing import Any

from torch import nn

from lightning_cp.engine.attention.attention_calls import attends, check_reachable, hides_processor, is_defined_by
from lightning_cp.engine.model_plan import Arguments, AttentionSpecs, Embedding, Halo, ModelPlan, Outputs
from lightning_cp.engine.paths import (
    arguments_of,
    block_paths,
    expand,
    expanded,
    is_a,
    position,
    submodule,
    without_adapters,
)
from lightning_cp.errors import PlanError
from lightning_cp.plans import LOCAL, Attention, Plan, Rows, Spec, Split


def fit_plan(module: nn.Module, plan: object) -> ModelPlan:
    """Fit a `Plan`, or a plan in diffusers' format, to `module`.

    Raises: PlanError: the plan names missing modules or arguments, or is malformed. TypeError: `plan` is no plan.
    """
    if isinstance(plan, Plan):
        return _from_plan(module, plan)
    if isinstance(plan, Mapping):
        return _from_diffusers(module, plan)
    raise TypeError(
        f"plan must be a lightning_cp.plans.Plan or a dict in diffusers' format, got a {type(plan).__name__}"
    )


def _from_plan(module: nn.Module, plan: Plan) -> ModelPlan:
    variant = plan.variant_for(getattr(module, "config", None))
    if isinstance(variant, str):
        raise PlanError(f"this {type(module).__name__} cannot run context-parallel: {variant}")
    plan = variant
    _check_modalities(plan)
    for name in plan.required:
        position(type(module).__name__, module, name)
    arguments = [arguments_of(module, ("",), plan.inputs)] if plan.inputs else []
    outputs = [Outputs(path, spec, gathers=True) for path, spec in expanded(module, plan.gather)]
    outputs += [Outputs(path, spec, gathers=False) for path, spec in expanded(module, plan.split_outputs)]
    arguments += [arguments_of(module, (path,), specs) for path, specs in expanded(module, plan.arguments)]
    whole = [
        (path, x) for path, x in expanded(module, plan.whole) if not x.only or is_a(submodule(module, path), x.only)
    ]
    arguments += [arguments_of(module, (path,), x.arguments, gathers=True) for path, x in whole]
    outputs += [Outputs(path, x.output, gathers=False) for path, x in whole if x.output is not None]
    kinds: dict[str, AttentionSpecs] = {}
    scopes: dict[str, AttentionSpecs] = {}
    for pattern, specs in plan.blocks.items():
        paths = block_paths(module, pattern)
        if paths:
            arguments.append(arguments_of(module, paths, specs, is_block=True))
        for path in paths:
            kinds.update(_attention(submodule(module, path), path, pattern, plan))
            scopes.update(_scopes(submodule(module, path), path, pattern, plan))
    whole_paths = tuple(f"{path}." for path, _ in whole)
    attention = {path: x for path, x in kinds.items() if x and not f"{path}.".startswith(whole_paths)}
    covered = [*(path for paths in plan.blocks for path in block_paths(module, paths)), *(path for path, _ in whole)]
    halos = tuple(_halo(module, path, *entry) for path, entry in expanded(module, plan.halos))
    return ModelPlan(
        arguments=tuple(arguments),
        outputs=tuple(outputs),
        attention=attention,
        main=plan.main,
        required=plan.required,
        refused=plan.refused,
        keeps_keys=plan.keeps_keys,
        refused_backends=plan.refused_backends,
        pads=plan.pads,
        embeddings=tuple(starmap(Embedding, expanded(module, plan.embeddings))),
        halos=halos,
        optional=plan.optional,
        needed=plan.needed,
        leading=plan.leading,
        patches=plan.patches,
        feed_forwards=plan.feed_forwards,
        unplanned=tuple(_unplanned(module, covered)),
        scopes=scopes,
        not_followed=tuple(path for path in attention if hides_processor(submodule(module, path))),
        dividers={x.per: _divider(module, x.per) for x in plan.inputs.values() if isinstance(x, Rows) and x.per},
    )


def _check_modalities(plan: Plan) -> None:
    """Check that some tensor holds each named modality, and that the plan gathers something. Raises: PlanError."""
    modalities = plan.held_modalities
    if plan.main not in modalities:
        raise PlanError(
            f"main={plan.main!r} is none of the modalities of the plan's blocks and inputs ({', '.join(modalities)}): "
            "set main= to the modality that must have a token on each rank (the image, video or audio)"
        )
    for path, modality in plan.embeddings.items():
        if modality not in modalities:
            raise PlanError(
                f"embeddings[{path!r}]={modality!r} is none of the modalities of the plan's blocks and inputs "
                f"({', '.join(modalities)}): use the one of the patches that it embeds"
            )
    if not plan.gather and all(x.output is not None for x in plan.whole.values()):
        raise PlanError("the plan gathers nothing, so the model would return a shard: name a module in gather=")


def _divider(module: nn.Module, name: str) -> int:
    value = getattr(getattr(module, "config", None), name, None)
    value = value[0] if isinstance(value, (list, tuple)) else value
    if not isinstance(value, int):
        raise PlanError(
            f"the plan divides rows by {name!r}, which must be an int in the config of {type(module).__name__}"
        )
    return value


def _halo(module: nn.Module, path: str, dim: int, modality: str) -> Halo:
    convolution = without_adapters(submodule(module, path))
    if not isinstance(convolution, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) or dim < 2:
        raise PlanError(
            f"the plan names {path!r} as a convolution over dim {dim}, but it is a {type(convolution).__name__}"
        )
    kernel, step, dilation = (x[dim - 2] for x in (convolution.kernel_size, convolution.stride, convolution.dilation))
    padding = convolution.padding if isinstance(convolution.padding, str) else convolution.padding[dim - 2]
    reach = dilation * (kernel - 1) // 2
    if kernel % 2 == 0 or step != 1 or padding not in ("same", reach) or convolution.padding_mode != "zeros":
        raise PlanError(
            f"{path} must have an odd kernel, stride 1 and zero padding that keeps the size, to be split in dim {dim}"
        )
    return Halo(path, dim, modality, reach)


def _attention(block: nn.Module, path: str, stack: str, plan: Plan) -> Iterator[tuple[str, AttentionSpecs]]:
    """Yield the path and kinds of attention of each module in a block that attends; no kinds if it is LOCAL."""
    attends_anywhere = False
    for name, inner in block.named_modules():
        at = f"{path}.{name}" if name else path
        kinds = _kinds(stack, name, plan)
        special = bool(kinds) and kinds[0].form != "softmax"
        if special:
            _check_processor(inner, at, kinds[0])
        owner = block.get_submodule(name.rpartition(".")[0])
        if inner is getattr(owner, "processor", None):  # a processor with weights: its owner is checked
            continue
        if kinds and not special:
            check_reachable(inner, at)
        if special or attends(inner):
            attends_anywhere = True
            yield at, kinds
    if not attends_anywhere:
        raise PlanError(
            f"{path} ({type(block).__name__}) makes no attention call that could be intercepted: it must go through "
            "diffusers' dispatch_attention_fn or F.scaled_dot_product_attention, called by a forward, by a processor "
            "or by functions and methods that these call"
        )


def _unplanned(module: nn.Module, covered: list[str]) -> Iterator[str]:
    """Yield the paths of modules that attend and are outside of the modules that the plan covers."""
    inside = {id(inner) for path in covered if path for inner in submodule(module, path).modules()}
    for path, inner in module.named_modules():
        owner = module.get_submodule(path.rpartition(".")[0])
        if id(inner) not in inside and inner is not getattr(owner, "processor", None) and attends(inner):
            yield path


def _scopes(block: nn.Module, path: str, stack: str, plan: Plan) -> Iterator[tuple[str, AttentionSpecs]]:
    """Yield the path and kinds of attention of a block, and of each module in it that the plan's `attention` names."""
    for name, _ in block.named_modules():
        if not name or _keys(stack, name, plan):
            yield f"{path}.{name}" if name else path, _kinds(stack, name, plan)


def _keys(stack: str, name: str, plan: Plan) -> list[str]:
    """List the keys of the plan's `attention` that name a module in a block, most specific first."""
    # Compared as text first, because "[" is special in fnmatch.
    keys = [key for key in plan.attention if key == (f"{stack}.{name}" if name else stack)]
    keys += [key for key in plan.attention if fnmatch.fnmatchcase(f"{stack.partition('[')[0]}.{name}", key)]
    return keys + [key for key in plan.attention if fnmatch.fnmatchcase(name, key)]


def _kinds(stack: str, name: str, plan: Plan) -> AttentionSpecs:
    """Return the kinds of attention of a module in a block; none for LOCAL."""
    keys = _keys(stack, name, plan)
    if not keys:
        return (Attention(plan.modalities, ordered=len(plan.modalities) == 1),)
    entry = plan.attention[keys[0]]
    if isinstance(entry, Attention):
        return (entry,)
    kinds = tuple(kind for kind in entry if isinstance(kind, Attention))
    modalities = tuple(modality for modality in entry if isinstance(modality, str))
    if not kinds:
        return (Attention(modalities),) if modalities else ()
    if LOCAL in entry:  # last: a call is LOCAL only if no other kind fits
        kinds += tuple(Attention(queries, keys=LOCAL) for queries in dict.fromkeys(kind.queries for kind in kinds))
    return kinds


def _check_processor(module: nn.Module, path: str, kind: Attention) -> None:
    processor: Any = getattr(module, "processor", None)
    processor_name = type(processor).__name__
    if processor_name not in kind.replaces_processors:
        raise PlanError(
            f"{path} has a {processor_name}, expected {' or '.join(kind.replaces_processors)}: the plan supports "
            f"{kind.form} attention of these processors only"
        )
    if not is_defined_by(type(processor), type(processor).__call__):
        raise PlanError(
            f"{path}: {processor_name}.__call__ was replaced by another function, but context-parallel {kind.form} "
            f"attention computes what the original {processor_name} does: restore it"
        )


def _from_diffusers(module: nn.Module, plan: Mapping[str, Any]) -> ModelPlan:
    """Fit a plan in diffusers' format; kinds of attention are derived from token counts."""
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
    return ModelPlan(tuple(arguments), tuple(outputs), attention, "", {}, {}, not_followed=not_followed)


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
