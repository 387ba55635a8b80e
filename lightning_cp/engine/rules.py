"""A plan as a list of what to do at which module, checked against the model before anything is touched."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_cp.engine.seam import attends
from lightning_cp.errors import PlanError
from lightning_cp.plans import Attention, Pad, Plan, Spec, Split

_ENTRIES = "diffusers.models._modeling_parallel"


@dataclass(frozen=True)
class Arguments:
    """Arguments of some modules that are split, or made whole, before their forward.

    paths: of the modules. positions: index of each argument in the forward's signature.
    """

    paths: tuple[str, ...]
    specs: Mapping[str, Spec]
    positions: Mapping[str, int]
    is_block: bool = False
    joins: bool = False
    always: bool = False  # split whatever comes (diffusers' format), rather than what is still whole


@dataclass(frozen=True)
class Outputs:
    """Outputs of a module that are split, or gathered, after its forward."""

    path: str
    spec: Spec
    gathers: bool
    always: bool = False


Kinds = tuple[Attention, ...]


@dataclass(frozen=True)
class Halo:
    """A convolution that sees `reach` neighbouring rows on both sides, in `dim` of its input."""

    path: str
    dim: int
    stream: str
    reach: int


@dataclass(frozen=True)
class Rules:
    """A plan, compiled for one model.

    attention: by path of each module that attends across ranks (None: to be found out).
    """

    arguments: tuple[Arguments, ...]
    outputs: tuple[Outputs, ...]
    attention: Mapping[str, Kinds | None]
    main: str
    required: Mapping[str, str]
    refused: Mapping[str, str]
    refused_backends: Mapping[str, str] = field(default_factory=dict)
    pads: tuple[Pad, ...] = ()
    halos: tuple[Halo, ...] = ()


def compile_rules(module: nn.Module, plan: object) -> Rules:
    """Rules of a `Plan`, or of a plan in diffusers' format, for `module`.

    Raises: PlanError: it names modules or arguments that are not there, or is malformed. TypeError: no plan at all.
    """
    if isinstance(plan, Plan):
        return _from_plan(module, plan)
    if isinstance(plan, Mapping):
        return _from_diffusers(module, plan)
    raise TypeError(f"plan must be a lightning_cp.plans.Plan or a dict in diffusers' format, not {type(plan).__name__}")


def submodule(module: nn.Module, path: str) -> nn.Module:
    """The module at `path`; "-1" is a list's last. Raises: PlanError."""
    found = module
    for i, atom in enumerate(path.split(".") if path else ()):
        last_of = (
            isinstance(found, nn.ModuleList) and atom.lstrip("-").isdigit() and -len(found) <= int(atom) < len(found)
        )
        nested = found[int(atom)] if last_of else getattr(found, atom, None)  # type: ignore[index]
        if not isinstance(nested, nn.Module):
            at = ".".join(path.split(".")[:i]) or type(module).__name__
            raise PlanError(f"the plan names {path!r}, but {at} has no module {atom!r}")
        found = nested
    return unwrapped(found)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside activation-checkpointing and compiler wrappers."""
    for name in ("_checkpoint_wrapped_module", "_orig_mod"):
        inner = module._modules.get(name)
        if inner is not None:
            return unwrapped(inner)
    return module


def _from_plan(module: nn.Module, plan: Plan) -> Rules:
    for (setting, value), variant in plan.variants.items():
        if getattr(getattr(module, "config", None), setting, None) == value:
            return _from_plan(module, variant)
    for name in plan.required:
        _position(type(module).__name__, module, name)
    arguments = [_arguments(module, ("",), plan.inputs)] if plan.inputs else []
    outputs = [Outputs(path, spec, gathers=True) for path, spec in _expanded(module, plan.gather)]
    outputs += [Outputs(path, spec, gathers=False) for path, spec in _expanded(module, plan.split_outputs)]
    arguments += [_arguments(module, (path,), specs) for path, specs in _expanded(module, plan.arguments)]
    whole = [
        (path, x) for path, x in _expanded(module, plan.whole) if x.only in ("", type(submodule(module, path)).__name__)
    ]
    arguments += [_arguments(module, (path,), x.arguments, joins=True) for path, x in whole]
    outputs += [Outputs(path, x.output, gathers=False) for path, x in whole if x.output is not None]
    attention: dict[str, Kinds | None] = {}
    for stack, specs in plan.blocks.items():
        paths = _stack(module, stack)
        if paths:
            arguments.append(_arguments(module, paths, specs, is_block=True))
        for path in paths:
            attention.update(_attention(submodule(module, path), path, stack, plan))
    aside = tuple(f"{path}." for path, _ in whole)
    attention = {path: x for path, x in attention.items() if not f"{path}.".startswith(aside)}
    halos = tuple(_halo(module, path, *entry) for path, entry in _expanded(module, plan.halos))
    return Rules(
        arguments=tuple(arguments),
        outputs=tuple(outputs),
        attention=attention,
        main=plan.main,
        required=plan.required,
        refused=plan.refused,
        refused_backends=plan.refused_backends,
        pads=plan.pads,
        halos=halos,
    )


def _halo(module: nn.Module, path: str, dim: int, stream: str) -> Halo:
    convolution = submodule(module, path)
    if not isinstance(convolution, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) or dim < 2:
        raise PlanError(
            f"the plan names {path!r} as a convolution over dim {dim}: it is a {type(convolution).__name__}"
        )
    kernel, step, dilation = (x[dim - 2] for x in (convolution.kernel_size, convolution.stride, convolution.dilation))
    padding = convolution.padding if isinstance(convolution.padding, str) else convolution.padding[dim - 2]
    reach = dilation * (kernel - 1) // 2
    if kernel % 2 == 0 or step != 1 or padding not in ("same", reach) or convolution.padding_mode != "zeros":
        raise PlanError(f"{path} must have an odd kernel, stride 1 and as many zeros around it to be cut in dim {dim}")
    return Halo(path, dim, stream, reach)


def _expanded(module: nn.Module, table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(path, entry) for pattern, entry in table.items() for path in _expand(module, pattern)]


def _stack(module: nn.Module, pattern: str) -> tuple[str, ...]:
    """Paths of the blocks that "blocks", or "blocks[a:b]", names."""
    stack, _, bounds = pattern.partition("[")
    blocks = submodule(module, stack)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        raise PlanError(
            f"the plan names {stack!r} as a list of blocks, but it is a {type(blocks).__name__} without any"
        )
    first, _, last = bounds.rstrip("]").partition(":")
    start, stop = _bound(module, first, len(blocks), default=0), _bound(module, last, len(blocks), default=len(blocks))
    return tuple(f"{stack}.{i}" for i in range(start, stop))


def _bound(module: nn.Module, text: str, blocks: int, *, default: int) -> int:
    name = text.lstrip("-")
    if not name:
        return default
    value = int(name) if name.isdigit() else getattr(module, name, None)
    if not isinstance(value, int) or value > blocks:
        raise PlanError(f"the plan bounds a list of {blocks} blocks by {text!r}, which {type(module).__name__} has not")
    return blocks - value if text.startswith("-") else value


def _attention(block: nn.Module, path: str, stack: str, plan: Plan) -> Iterator[tuple[str, Kinds]]:
    found = False
    for name, inner in block.named_modules():
        at = f"{path}.{name}" if name else path
        kinds = _kinds(stack, name, plan)
        special = bool(kinds) and kinds[0].form != "softmax"
        if special:
            _check_processor(inner, at, kinds[0])
        if not special and not attends(inner):
            continue
        found = True
        if kinds:
            yield at, kinds
    if not found:
        raise PlanError(
            f"{path} ({type(block).__name__}) makes no attention call that could be intercepted: it must go through "
            "diffusers' dispatch_attention_fn or F.scaled_dot_product_attention"
        )


def _kinds(stack: str, name: str, plan: Plan) -> Kinds:
    """What a module in a block attends to; empty for LOCAL."""
    keys = [key for key in plan.attention if key == f"{stack}.{name}"]  # a bracket is no pattern here
    keys += [key for key in plan.attention if fnmatch.fnmatchcase(f"{stack.partition('[')[0]}.{name}", key)]
    keys += [key for key in plan.attention if fnmatch.fnmatchcase(name, key)]
    entry = plan.attention[keys[0]] if keys else plan.streams
    if isinstance(entry, Attention):
        return (entry,)
    kinds = tuple(kind for kind in entry if isinstance(kind, Attention))
    streams = tuple(stream for stream in entry if isinstance(stream, str))
    return kinds or ((Attention(streams),) if streams else ())


def _check_processor(module: nn.Module, path: str, kind: Attention) -> None:
    found = type(getattr(module, "processor", None)).__name__
    if found not in kind.stands_for:
        raise PlanError(f"{path} has a {found}; its plan knows {kind.form} attention of {', '.join(kind.stands_for)}")


def _from_diffusers(module: nn.Module, plan: Mapping[str, Any]) -> Rules:
    arguments: list[Arguments] = []
    outputs: list[Outputs] = []
    for pattern, entry in plan.items():
        if not isinstance(pattern, str):
            raise PlanError(f"the plan names {pattern!r}: a key is the path of a module as a str")
        if isinstance(entry, (Mapping, list, tuple)) and not entry:
            raise PlanError(f"plan entry {pattern!r} is empty: leave it out, or say what to split or gather")
        for path in _expand(module, pattern):
            if isinstance(entry, Mapping):
                inputs = {
                    name: _theirs(x, pattern, gathers=False) for name, x in entry.items() if isinstance(name, str)
                }
                if inputs:
                    arguments.append(_arguments(module, (path,), inputs, always=True))
                indexed = {i: _theirs(x, pattern, gathers=False) for i, x in entry.items() if isinstance(i, int)}
                if any(not getattr(entry[i], "split_output", False) for i in indexed):
                    raise PlanError(
                        f"plan entry {pattern!r}: an integer key splits an output and needs split_output=True"
                    )
                if indexed:
                    spec = tuple(indexed.get(i) for i in range(max(indexed) + 1))
                    outputs.append(Outputs(path, spec, gathers=False, always=True))
            elif isinstance(entry, (list, tuple)):
                spec = tuple(None if x is None else _theirs(x, pattern, gathers=True) for x in entry)
                outputs.append(Outputs(path, spec, gathers=True, always=True))
            else:
                outputs.append(Outputs(path, (_theirs(entry, pattern, gathers=True),), gathers=True, always=True))
    if not any(rule.gathers for rule in outputs):
        raise PlanError("the plan gathers nothing: it needs a ContextParallelOutput, or the output would be a shard")
    attention = {name: None for name, inner in module.named_modules() if attends(inner)}
    if not attention:
        raise PlanError(
            f"{type(module).__name__} makes no attention call that could be intercepted: it must go through "
            "diffusers' dispatch_attention_fn or F.scaled_dot_product_attention"
        )
    return Rules(tuple(arguments), tuple(outputs), attention, "", {}, {})


def _theirs(entry: Any, where: str, *, gathers: bool) -> Spec:
    """diffusers' entry as a spec without streams."""
    if isinstance(entry, (list, tuple)):
        return tuple(_theirs(x, where, gathers=gathers) for x in entry)
    kind, wanted = type(entry), "ContextParallelOutput" if gathers else "ContextParallelInput"
    if kind.__module__ == _ENTRIES and kind.__name__ == wanted:
        return Split(entry.gather_dim if gathers else entry.split_dim, (), entry.expected_dims)
    if isinstance(entry, Split):
        return entry
    raise PlanError(f"plan entry {where!r} holds a {kind.__name__} where a {wanted} belongs")


def _expand(module: nn.Module, pattern: str) -> list[str]:
    """Paths of a pattern with at most one `*`, which stands for each module of a list."""
    atoms = pattern.split(".")
    if atoms.count("*") > 1:
        raise PlanError(f"the plan names {pattern!r}: '*' can stand only once")
    if "*" not in atoms:
        submodule(module, pattern)
        return [pattern]
    at = atoms.index("*")
    stack = submodule(module, ".".join(atoms[:at]))
    if not isinstance(stack, (nn.ModuleList, nn.ModuleDict)):
        raise PlanError(f"the plan names {pattern!r}, but '*' stands for a {type(stack).__name__}, not a ModuleList")
    paths = [".".join([*atoms[:at], name, *atoms[at + 1 :]]) for name, _ in stack.named_children()]
    for path in paths:
        submodule(module, path)
    return paths


def _arguments(
    module: nn.Module,
    paths: tuple[str, ...],
    specs: Mapping[str, Spec],
    *,
    is_block: bool = False,
    joins: bool = False,
    always: bool = False,
) -> Arguments:
    where = submodule(module, paths[0])
    positions = {name: _position(paths[0] or type(module).__name__, where, name) for name in specs}
    return Arguments(paths, dict(specs), positions, is_block, joins, always)


def _position(path: str, module: nn.Module, name: str) -> int:
    """Index of an argument in the module's forward; -1 for one that is given by keyword only."""
    parameters = inspect.signature(type(module).forward).parameters
    if name in parameters:
        return list(parameters).index(name) - 1
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return -1
    raise PlanError(
        f"the plan names the argument {name!r} of {path}, but {type(module).__name__}.forward takes "
        f"{', '.join(list(parameters)[1:])}"
    )
