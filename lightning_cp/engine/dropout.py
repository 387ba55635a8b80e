"""Dropout of shards: other masks on each rank, and the same random states on all ranks afterwards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_cp.engine.hook_base import EngineHook
from lightning_cp.engine.paths import submodule
from lightning_cp.engine.rules import Rules
from lightning_cp.engine.session import Session


@dataclass(eq=False)
class DropoutHook(EngineHook):
    """Around a dropout module in a block: seed the generator for this rank, then give it its state back.

    The seed is made of a number that all ranks draw alike, and of the rank. So a replay (activation checkpointing) that
    begins from the states of the first time drops the same elements. Nothing is done in evaluation, for p = 0, and
    outside of a forward that has split tensors.
    """

    session: Session
    saved: list[tuple[torch.Generator, Tensor] | None] = field(default_factory=list)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Draw from a state of this rank's own."""
        if torch.compiler.is_compiling():
            return
        self.saved.append(None)
        call, x = self.session.call, args[0] if args else None
        is_active = module.training and module.p != 0 and isinstance(x, Tensor)
        if not is_active or call is None or not call.lengths or call.groups.context is None:
            return
        drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        mixed = hashlib.blake2b(f"{drawn}/{call.groups.context_rank}".encode(), digest_size=8).digest()
        generator = _generator_of(args[0].device)
        self.saved[-1] = generator, generator.get_state()
        generator.manual_seed(int.from_bytes(mixed, "big") >> 1)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Go on from the state that all ranks share."""
        if not torch.compiler.is_compiling() and self.saved:
            saved = self.saved.pop()
            if saved is not None:
                generator, state = saved
                generator.set_state(state)


class ShardDropouts:
    """Puts `DropoutHook`s on the dropout modules of a model that have p > 0, when it begins to train.

    They are looked for in the first forwards in training mode, since a LoRA may come with dropout of its own.
    """

    def __init__(self, module: nn.Module, rules: Rules, session: Session) -> None:
        self._module, self._rules, self._session = module, rules, session
        self._looks = 2

    def follow(self) -> None:
        """Look for new dropout modules."""
        if not self._looks or not self._module.training or self._session.groups.context is None:
            return
        self._looks -= 1
        for dropout in _sharded_dropouts(self._module, self._rules):
            hooked = any(isinstance(getattr(x, "__self__", None), DropoutHook) for x in dropout._forward_hooks.values())
            if dropout.p != 0 and not hooked:
                hook = DropoutHook(self._session)
                dropout.register_forward_pre_hook(hook.before)
                dropout.register_forward_hook(hook.after, always_call=True)


def _sharded_dropouts(module: nn.Module, rules: Rules) -> Iterator[_DropoutNd]:
    """Dropout modules that see this rank's tokens: those in the planned blocks.

    For a plan that names no blocks: those in the outermost modules that hold attention (entries of lists of modules).
    """
    blocks = {path for rule in rules.arguments if rule.is_block for path in rule.paths}
    if not blocks:
        blocks = {_outermost(module, path) for path in rules.attention if path}
    whole = [f"{path}." for rule in rules.arguments if rule.joins for path in rule.paths]
    for block in sorted(blocks):
        for name, inner in submodule(module, block).named_modules():
            path = f"{block}.{name}."
            if isinstance(inner, _DropoutNd) and not any(path.startswith(start) for start in whole):
                yield inner


def _outermost(module: nn.Module, path: str) -> str:
    """The shortest beginning of a path that is a module of its own, not a list of modules."""
    atoms = path.split(".")
    for count in range(1, len(atoms)):
        begins = ".".join(atoms[:count])
        if not isinstance(submodule(module, begins), (nn.ModuleList, nn.ModuleDict)):
            return begins
    return path


def _generator_of(device: torch.device) -> torch.Generator:
    """The one that dropout on this device draws from."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator: torch.Generator = torch.cuda.default_generators[index]
        return generator
    return torch.default_generator
