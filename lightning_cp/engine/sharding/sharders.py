"""Hooks that pad, split or gather the arguments and outputs of modules according to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp.comm.shards import gather_shards
from lightning_cp.comm.stats import STATS
from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.engine.hook_base import EngineHook, refuse_arguments
from lightning_cp.engine.model_plan import Arguments, Outputs
from lightning_cp.engine.session import Call, Session
from lightning_cp.engine.sharding.lengths import find_sizes
from lightning_cp.engine.sharding.specs import check_dim, shard, shard_unconditionally, unshard
from lightning_cp.errors import ShapeError
from lightning_cp.nest import named_tensors, of_type
from lightning_cp.plans import Kept, Pad, Spec, Split


@dataclass(eq=False)
class ArgumentHook(EngineHook):
    """Hook that splits or gathers arguments before a module's forward."""

    session: Session
    rule: Arguments
    refused: Mapping[str, str]
    name: str
    order: Sequence[str] = ()  # names of the forward's arguments

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not torch.compiler.is_compiling():  # traced reads become guards
            call = self.session.current()
            if call.split_block is module:
                call.split_block = None
                return args, kwargs
            if not self.session.succeeded:
                call.block = self.name
                call.unplanned = unplanned_shapes(self.order, args, kwargs, self.rule.specs)
        positional, named, call = list(args), dict(kwargs), self.session.current()
        before = tuple(call.lengths)
        if self.refused:
            refuse_arguments(self.refused, {**dict(zip(self.order, args)), **named})
        for name, spec in self.rule.specs.items():
            position = self.rule.positions[name]
            if name in named:
                named[name] = self._shard(named[name], spec, name, before)
            elif 0 <= position < len(positional):
                positional[position] = self._shard(positional[position], spec, name, before)
        return tuple(positional), named

    def _shard(self, value: Any, spec: Spec, name: str, before: Sequence[str]) -> Any:
        shown = f"{self.name}({name})"
        if self.rule.always:
            return shard_unconditionally(value, spec, name=shown, session=self.session)
        if self.rule.gathers:
            return unshard(value, spec, name=shown, session=self.session)
        return shard(value, spec, name=shown, session=self.session, strict=self.rule.is_block, before=before)


@dataclass(eq=False)
class OutputHook(EngineHook):
    """Hook that splits or gathers outputs after a module's forward."""

    session: Session
    rule: Outputs

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        rule, session = self.rule, self.session
        STATS.enter(module)
        name = f"the output of {rule.path}"
        if not rule.always and rule.gathers:
            return unshard(output, rule.spec, name=name, session=session)
        if not rule.always:
            before = tuple(session.current().lengths)
            return shard(output, rule.spec, name=name, session=session, strict=True, before=before)
        assert isinstance(rule.spec, tuple), "fit_plan makes a tuple, one spec for each output"
        values = [output] if isinstance(output, Tensor) else list(output)
        if rule.gathers and len(values) != len(rule.spec):
            raise ShapeError(f"{rule.path} returns {len(values)} outputs, but its plan gathers {len(rule.spec)}")
        if len(values) < len(rule.spec):
            raise ShapeError(
                f"{rule.path} returns {len(values)} outputs, but its plan splits output {len(rule.spec) - 1}"
            )
        for i, spec in enumerate(rule.spec):
            if spec is None:
                continue
            if rule.gathers:
                values[i] = self._gather(values[i], spec)
            else:
                values[i] = shard_unconditionally(values[i], spec, name=f"{rule.path}[{i}]", session=session)
        return values[0] if isinstance(output, Tensor) else type(output)(values)

    def _gather(self, x: Tensor, spec: Spec) -> Tensor:
        assert isinstance(spec, Split), "a model plan holds one split for each gathered output"
        if not spec.is_for(x.ndim):
            return x
        check_dim(x, spec, self.rule.path)
        call, length = self.session.current(), x.shape[spec.dim]
        options = find_sizes(self.session, length, length)
        if options is None:
            raise ShapeError(
                f"the output of {self.rule.path} has {length} tokens on every rank, so it is not split: gather the "
                "output of another module"
            )
        sizes = options[0]
        if call.groups.context is None:
            sizes = [length]
        elif not sizes:
            sizes = [n for (n,) in all_gather_ints([length], group=call.groups.context)]
        if sum(sizes) < len(sizes):
            raise ShapeError(
                f"the output of {self.rule.path} has {sum(sizes)} tokens, fewer than the {len(sizes)} ranks of the "
                "context group: use lower degrees or a longer sequence"
            )
        return gather_shards(x, spec.dim % x.ndim, list(sizes), call.groups.name)


@dataclass(eq=False)
class PadHook(EngineHook):
    """Hook before the model: pads texts with fewer tokens than shards, and masks the padding."""

    session: Session
    signature: Any  # signature of the model's forward
    pads: Sequence[Pad]

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            bound = self.signature.bind(module, *args, **kwargs)
        except TypeError:
            return args, kwargs  # the forward itself raises the error
        arguments, changed = bound.arguments, False
        for pad in self.pads:
            tokens, mask = arguments.get(pad.tokens), arguments.get(pad.mask)
            shards = self.session.current().num_shards
            if not isinstance(tokens, Tensor) or not 0 <= tokens.shape[1] < shards:
                continue
            missing = shards - tokens.shape[1]
            if mask is None:
                mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
            arguments[pad.tokens] = F.pad(tokens, (0, 0, 0, missing))
            arguments[pad.mask] = F.pad(mask, (0, missing))
            changed = True
        return (bound.args[1:], bound.kwargs) if changed else (args, kwargs)


def shard_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Run a module's argument hooks without the module: they define the lengths of modalities.

    Returns: the arguments that the module would get.
    """
    for hook in module._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, ArgumentHook):
            args, kwargs = owner.before(module, args, kwargs)
    return args, kwargs


def shard_before_checkpoint(
    block: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call
) -> tuple[Any, dict[str, Any]] | None:
    """Split the arguments of a block whose checkpoint keeps them for backward, so that it keeps this rank's tokens.

    Blocks that get the same tensor, of positions for example, share its shard.

    Returns: the arguments to call the block with; None: the block must split them itself.
    """
    hooks = [getattr(hook, "__self__", None) for hook in getattr(block, "_forward_pre_hooks", {}).values()]
    actions = [hook.rule for hook in hooks if isinstance(hook, ArgumentHook)]
    kept = any(True for rule in actions for spec in rule.specs.values() for _ in of_type(Kept, spec))
    if len(actions) != 1 or kept or call.num_shards == 1 or call.split_block is not None:
        return None
    call.shares_shards = True
    try:
        return shard_arguments(block, args, kwargs)
    finally:
        call.shares_shards = False


def unplanned_shapes(
    order: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], planned: Mapping[str, object]
) -> dict[str, tuple[int, ...]]:
    """Collect the shapes of a block's tensors that its plan does not mention, by the name of the argument.

    Args: order: names of the forward's arguments, in order. planned: arguments that the plan mentions, by name.
    """
    arguments = {**dict(zip(order, args)), **kwargs}
    unplanned = {name: value for name, value in arguments.items() if name not in planned}
    return {name: tuple(x.shape) for name, x in named_tensors("", unplanned)}


def missing_split(call: Call) -> str | None:
    """Describe arguments of the last block that hold all tokens of modalities and are not split; None if none do."""
    sums: dict[int, tuple[str, ...]] = {}
    for count in (1, 2, 3):
        for modalities in combinations(call.lengths, count):
            whole, local = sum(call.lengths[x] for x in modalities), call.sizes(modalities)[call.groups.context_rank]
            if whole != local:
                sums.setdefault(whole, modalities)
    unsplit = [
        f"{name!r} (shape {shape}) holds {n} in dim {dim}, which is the number of all tokens{_of(sums[n])}"
        for name, shape in call.unplanned.items()
        for dim, n in enumerate(shape)
        if n in sums
    ]
    return "; ".join(unsplit) or None


def _of(modalities: Sequence[str]) -> str:
    """Name modalities; "" if they have no names: a plan in diffusers' format names them by their lengths."""
    return "" if any(name.isdecimal() for name in modalities) else f" of {' + '.join(modalities)}"
