"""What runs around a parallel model's forward, its blocks and its split and gathered places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.comm.notes import NOTES
from lightning_cp.comm.shards import gather
from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.engine.cutting import check_dim, cut, cut_always, join
from lightning_cp.engine.lengths import find_sizes
from lightning_cp.engine.rules import Arguments, Outputs, Rules
from lightning_cp.engine.session import Call, Session
from lightning_cp.errors import InterceptionError, ShapeError
from lightning_cp.plans import Spec, Split


class EngineHook:
    """Base of our hook objects, by which they are found and taken off.

    A deep copy of a model keeps the hooks of its original until its first forward, which puts new ones in their place.
    """

    def __deepcopy__(self, memo: object) -> Any:
        return self


def remove_hooks(module: nn.Module) -> None:
    """Take our hooks off one module, whichever session they belong to. Hooks of others stay."""
    for hooks, details in (
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
        (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
    ):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), EngineHook):
                del hooks[key]
                for detail in details:
                    detail.pop(key, None)


@dataclass(eq=False)
class ArgumentHook(EngineHook):
    """Splits arguments before a module's forward, or makes them whole."""

    session: Session
    rule: Arguments
    refused: Mapping[str, str]
    name: str
    order: Sequence[str] = ()  # of the forward's arguments, where some are refused

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positional, named = list(args), dict(kwargs)
        if self.refused:
            refuse(self.refused, {**dict(zip(self.order, args)), **named})
        for name, spec in self.rule.specs.items():
            position = self.rule.positions[name]
            if name in named:
                named[name] = self._cut(named[name], spec, name)
            elif 0 <= position < len(positional):
                positional[position] = self._cut(positional[position], spec, name)
        return tuple(positional), named

    def _cut(self, value: Any, spec: Spec, name: str) -> Any:
        where = f"{self.name}({name})"
        if self.rule.always:
            return cut_always(value, spec, name=where, session=self.session)
        if self.rule.joins:
            return join(value, spec, name=where, session=self.session)
        return cut(value, spec, name=where, session=self.session, strict=self.rule.is_block)


@dataclass(eq=False)
class OutputHook(EngineHook):
    """Splits or gathers outputs after a module's forward."""

    session: Session
    rule: Outputs

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        rule, session = self.rule, self.session
        NOTES.enter(module)
        name = f"the output of {rule.path}"
        if not rule.always and rule.gathers:
            return join(output, rule.spec, name=name, session=session)
        if not rule.always:
            return cut(output, rule.spec, name=name, session=session, strict=True)
        assert isinstance(rule.spec, tuple), "diffusers' entries come as a tuple, one for each output"
        values = [output] if isinstance(output, Tensor) else list(output)
        if rule.gathers and len(values) != len(rule.spec):
            raise ShapeError(f"{rule.path} returns {len(values)} outputs, its plan gathers {len(rule.spec)}")
        if len(values) < len(rule.spec):
            raise ShapeError(f"{rule.path} returns {len(values)} outputs, its plan splits number {len(rule.spec) - 1}")
        for i, spec in enumerate(rule.spec):
            if spec is None:
                continue
            if rule.gathers:
                values[i] = self._gather(values[i], spec)
            else:
                values[i] = cut_always(values[i], spec, name=f"{rule.path}[{i}]", session=session)
        return values[0] if isinstance(output, Tensor) else type(output)(values)

    def _gather(self, x: Tensor, spec: Spec) -> Tensor:
        assert isinstance(spec, Split), "rules hold one split for each gathered output"
        if spec.ndim is not None and x.ndim != spec.ndim:
            return x
        check_dim(x, spec, self.rule.path)
        call, own = self.session.current(), x.shape[spec.dim]
        found = find_sizes(self.session, own, own)
        if found is None:
            raise ShapeError(
                f"the output of {self.rule.path} has {own} tokens on every rank, so it was never split: the plan "
                "gathers at the wrong place"
            )
        sizes = found[0]
        if call.groups.context is None:
            sizes = [own]
        elif not sizes:
            sizes = [n for (n,) in all_gather_ints([own], group=call.groups.context)]
        if sum(sizes) < len(sizes):
            raise ShapeError(
                f"the output of {self.rule.path} has {sum(sizes)} tokens, fewer than the {len(sizes)} ranks of the "
                "context group: use lower degrees or a longer sequence"
            )
        return gather(x, spec.dim % x.ndim, sizes, call.groups.name)


@dataclass(eq=False)
class _Replay(EngineHook):
    """A block as a checkpoint function calls it, now and again in backward: with the call it belongs to."""

    session: Session
    call: Call | None
    block: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before, self.session.call = self.session.call, self.call
        try:
            return self.block(*args, **kwargs)
        finally:
            self.session.call = before


@dataclass(eq=False)
class ModelHook(EngineHook):
    """Around the whole model: begins and ends a call, and splits and gathers the model's own arguments and outputs."""

    session: Session
    signature: Any  # of the model's forward
    rules: Rules
    checkpointing: list[nn.Module]
    padding: Any = None  # a `PadHook`, for plans that pad
    arguments: Sequence[ArgumentHook] = ()
    outputs: Sequence[OutputHook] = ()

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model's own forward, in a call of its own.

        Whatever ends it, a KeyboardInterrupt too, session and checkpointing functions are then as they were before.
        (A forward hook of torch's runs on success, or for every `Exception`, which a KeyboardInterrupt is not.)
        """
        given = self.before(module, args, kwargs)
        session = self.session
        outer = session.call if session.forwards else None  # not one that an interrupted replay has left
        session.call = Call(session.groups, session.peers)
        session.forwards += 1
        checkpoints: list[tuple[nn.Module, Any]] = []
        try:
            self._note_whole(given)
            self._wrap_checkpoints(checkpoints)
            if self.padding is not None:
                args, kwargs = self.padding.before(module, args, kwargs)
            for hook in self.arguments:
                args, kwargs = hook.before(module, args, kwargs)
            output = forward(*args, **kwargs)
            for joiner in self.outputs:
                output = joiner.after(module, args, output)
            self.after(module)
            return output
        finally:
            for inner, original in checkpoints:
                inner._gradient_checkpointing_func = original
            session.call = outer
            session.forwards -= 1
            NOTES.leave()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Check the arguments, before anything has begun. Returns: them, by name."""
        given = self._given(args, kwargs)
        NOTES.enter(module, module)
        if not torch.compiler.is_compiling():
            self._check(given, model=type(module).__name__)
        refuse_caches(module)
        return given

    def after(self, module: nn.Module) -> None:
        """Check a call that has succeeded. Raises: InterceptionError: none of its attention came to us."""
        session, call = self.session, self.session.current()
        if not torch.compiler.is_compiling():
            for key in call.met:
                session.settled.setdefault(key, True)
            if call.lengths:
                session.peers.start()  # unless a block that is compiled has split what came first
        if not self.rules.main and not call.intercepted and call.lengths:
            raise InterceptionError(
                f"{type(module).__name__} ran on shards, but none of its attention passed through lightning_cp, so its "
                "result would be wrong: it must go through dispatch_attention_fn or F.scaled_dot_product_attention"
            )

    def _note_whole(self, given: dict[str, Any]) -> None:
        """Note the lengths of arguments that the plan leaves whole."""
        split = {name for rule in self.rules.arguments if "" in rule.paths for name in rule.specs}
        for name, value in given.items():
            if name not in split:
                self.session.current().whole.update(x.shape[1] for x in _tensors(value) if x.ndim == 3)

    def _wrap_checkpoints(self, checkpoints: list[tuple[nn.Module, Any]]) -> None:
        """Have blocks that are checkpointed keep the call they belong to. A compiler replays what it has traced."""
        if torch.compiler.is_compiling():
            return
        for inner in self.checkpointing:
            if getattr(inner, "gradient_checkpointing", False):
                original: Any = inner._gradient_checkpointing_func
                checkpoints.append((inner, original))
                inner._gradient_checkpointing_func = self._checkpoint(original)  # type: ignore[assignment]

    def _checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        session = self.session

        def checkpoint(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return original(_Replay(session, session.call, block), *args, **kwargs)

        return checkpoint

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name; none where they do not fit the forward, which will say so itself."""
        try:
            given = self.signature.bind_partial(None, *args, **kwargs).arguments
        except TypeError:
            return {}
        return {name: x for name, x in given.items() if name != next(iter(self.signature.parameters))}

    def _check(self, given: dict[str, Any], *, model: str) -> None:
        session = self.session
        for name, reason in self.rules.required.items():
            if given and given.get(name) is None:
                raise ShapeError(f"{name} must be given to a context-parallel model: {reason}")
        refuse(self.rules.refused, given)
        if session.peers.compares_in_full:
            for name, reason in self.rules.leading.items():
                mask = given.get(name)
                if isinstance(mask, Tensor) and bool((mask[:, 1:] > mask[:, :-1]).any()):
                    raise ShapeError(f"{name} must keep the first tokens of each sample ({reason}): move padding last")
        session.peers.check(given, model=model)


def refuse_caches(module: nn.Module) -> None:
    """Raises: InterceptionError: one of diffusers' caches is on, which would look at this rank's tokens alone."""
    cache = getattr(module, "_cache_config", None)
    if cache is not None:
        raise InterceptionError(
            f"{type(cache).__name__}: diffusers' caches decide by, and keep, the tokens of one rank, so they cannot be "
            "used context-parallel: call disable_cache()"
        )


def refuse(refused: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """Raises: ShapeError: an argument, or ("argument.key") an entry or attribute of one, that must be left out."""
    for name, reason in refused.items():
        argument, _, key = name.partition(".")
        value = given.get(argument)
        if key:
            value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
        if value is not None:
            shown = f"a {type(value).__name__}" if isinstance(value, (Tensor, list, tuple, dict)) else repr(value)
            raise ShapeError(f"{name}={shown} cannot be used context-parallel ({reason}): leave it out")


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors of a nest."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for x in value:
            yield from _tensors(x)
    elif isinstance(value, dict):
        for x in value.values():
            yield from _tensors(x)
