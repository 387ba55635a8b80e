"""Draw different dropout masks on each rank for shards; random states stay the same on all ranks."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_cp.compat.torch_names import DropoutModule
from lightning_cp.engine.attention_patch import replace_methods
from lightning_cp.engine.forwards import own_forward, own_function, put_forward
from lightning_cp.engine.methods import ORIGINAL
from lightning_cp.engine.paths import submodule
from lightning_cp.engine.rebinding import DROPOUTS, OF_CLASS, Replacements, is_foreign, rebind
from lightning_cp.engine.rules import Rules
from lightning_cp.engine.session import Session
from lightning_cp.errors import InterceptionError

_Function = Callable[..., Any]
T = TypeVar("T")


class ShardDropouts:
    """Replace the dropout functions (`F.dropout`, `F.alpha_dropout`, ...) that modules in a model's blocks call.

    Dropout modules call them too. Other random numbers in a block (labels dropped by sample, blocks skipped at random)
    must be the same on all ranks of a context group, so they are not changed.

    Attributes:
        replacements: by name of the function in torch.nn.functional.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.replacements: Replacements = {name: _replacement(name, session) for name in DROPOUTS}
        self._functions: dict[tuple[_Function, bool], _Function | None] = {}  # None: the function calls no dropout
        self._methods: dict[object, Any] = {}  # replacements of methods, by function
        self._without: set[tuple[type, _Function]] = set()  # classes and their forwards that call no dropout function

    def install(self, module: nn.Module, rules: Rules) -> None:
        """Replace dropout in the blocks of a model; `attention_patch.release` undoes it for each module."""
        if self._session.groups.context is None:
            return
        outside = _whole_modules(module, rules)
        left: list[Any] = list(_sharded_modules(module, rules))
        while left:
            inner = left.pop()
            if inner is None or id(inner) in outside:
                continue
            left.extend(inner._modules.values())
            if (type(inner), type(inner).forward) not in self._without or own_forward(inner).get() is not None:
                self._replace_in(inner)

    def _replace_in(self, module: nn.Module) -> None:
        function, of_class = own_function(module), own_forward(module).get() is None
        if ORIGINAL in getattr(function, "__dict__", {}):
            return  # replaced already, together with the module's attention
        has_methods = replace_methods(module, self.replacements, self._methods)
        bound = self._bound(function, of_class=of_class, is_dropout=isinstance(module, DropoutModule))
        if bound is not None:
            put_forward(module, bound)
        elif function is type(module).forward and not has_methods:
            self._without.add((type(module), function))

    def _bound(self, function: _Function, *, of_class: bool, is_dropout: bool) -> _Function | None:
        key = function, of_class
        if key not in self._functions:
            bound: _Function | None = None
            if isinstance(function, types.FunctionType) and (is_dropout or not is_foreign(function)):
                bound = rebind(function, self.replacements)
            if bound is None and is_dropout:  # a subclass that calls the forward of its parent class
                bound = _wrap_dropout(function, self._session)
            if bound is not None:
                bound.__dict__.update({ORIGINAL: function, OF_CLASS: of_class})
            self._functions[key] = bound
        return self._functions[key]


def _replacement(name: str, session: Session) -> _Function:
    """Make a dropout function for shards. In evaluation, for p = 0 and on whole tensors it calls torch's function."""
    original = getattr(F, name)

    def drop(
        input: Tensor,
        p: float = 0.5,
        training: bool = "alpha" not in name,
        inplace: bool = False,
        *,
        train: bool | None = None,  # name of `training` in torch.dropout
    ) -> Tensor:
        training = training if train is None else train
        rank = _rank(session) if training and p != 0 else None
        if rank is None:
            whole: Tensor = original(input, p, training, inplace)
            return whole
        if torch.compiler.is_compiling() or _is_capturing(input):
            if name != "dropout":
                raise _not_in_a_graph(name)
            return _drop_in_graph(input, p, rank=rank, inplace=inplace)
        dropped: Tensor = _call_with_rank_seed(lambda: original(input, p, training, inplace), input.device, rank)
        return dropped

    return drop


def _wrap_dropout(function: _Function, session: Session) -> _Function:
    """Wrap the forward of a dropout module: it draws from a random state of this rank."""

    def forward(module: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        rank = _rank(session) if module.training and module.p != 0 else None
        if rank is None:
            return function(module, input, *args, **kwargs)
        if torch.compiler.is_compiling() or _is_capturing(input):
            raise _not_in_a_graph(type(module).__name__)
        return _call_with_rank_seed(lambda: function(module, input, *args, **kwargs), input.device, rank)

    return forward


def _rank(session: Session) -> int | None:
    """Return this rank's index in its context group; None if the current forward has split nothing."""
    call = session.call
    return None if call is None or not call.lengths or call.groups.context is None else call.groups.context_rank


def _call_with_rank_seed(function: Callable[[], T], device: torch.device, rank: int) -> T:
    """Seed the device's generator for this rank, call the function, and restore the generator's state.

    The seed is a hash of the rank and of a random number that is the same on all ranks. Recomputation (activation
    checkpointing) restores the random states, so it drops the same elements.
    """
    drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    mixed = hashlib.blake2b(f"{drawn}/{rank}".encode(), digest_size=8).digest()
    generator = _generator_of(device)
    state = generator.get_state()
    try:
        generator.manual_seed(int.from_bytes(mixed, "big") >> 1)
        return function()
    finally:
        generator.set_state(state)


def _drop_in_graph(x: Tensor, p: float, *, rank: int, inplace: bool) -> Tensor:
    """Compute dropout in compiled code and in CUDA graphs, which cannot change the state of a generator.

    Draw two numbers, the same on all ranks. The mask is a hash of these numbers, the rank and each element's index.
    """
    drawn = torch.randint(1 << 31, (2,), dtype=torch.int64, device=x.device)
    seeds = _hash((drawn + (rank + 1) * 0x3C6EF372) & _BITS)
    index = torch.arange(x.numel(), device=x.device).view(x.shape)
    mixed = _hash((index + seeds[0]) & _BITS) ^ seeds[1] ^ (index >> 32)
    factor = (_hash(mixed) >= round(p * (1 << 32))).to(x.dtype) * (0.0 if p == 1 else 1 / (1 - p))
    return x.mul_(factor) if inplace else x * factor


_BITS = 0xFFFFFFFF


def _hash(x: Tensor) -> Tensor:
    """Mix integers below 2**32. (A product with a factor below 2**31 does not overflow int64.)"""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _BITS
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _BITS
    return x ^ (x >> 15)


def _is_capturing(x: Tensor) -> bool:
    """Return True if x is on a GPU and a CUDA graph is being captured."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _not_in_a_graph(name: str) -> InterceptionError:
    return InterceptionError(
        f"{name} on shards cannot be compiled or captured in a CUDA graph: use nn.Dropout or F.dropout, or do not "
        "compile this block"
    )


def _sharded_modules(module: nn.Module, rules: Rules) -> Iterator[nn.Module]:
    """Yield the modules that get shards: the planned blocks.

    If the plan names no blocks: the outermost modules that contain attention (items of lists of modules).
    """
    blocks = {path for rule in rules.arguments if rule.is_block for path in rule.paths}
    if not blocks:
        blocks = {_outermost(module, path) for path in rules.attention if path}
    for path in sorted(blocks):
        yield submodule(module, path)


def _whole_modules(module: nn.Module, rules: Rules) -> set[int]:
    """Return the ids of modules that get whole tensors, inside blocks too."""
    return {id(submodule(module, path)) for rule in rules.arguments if rule.gathers for path in rule.paths if path}


def _outermost(module: nn.Module, path: str) -> str:
    """Return the shortest prefix of a path that is a module other than a list or dict of modules."""
    atoms = path.split(".")
    for count in range(1, len(atoms)):
        prefix = ".".join(atoms[:count])
        if not isinstance(submodule(module, prefix), (nn.ModuleList, nn.ModuleDict)):
            return prefix
    return path


def _generator_of(device: torch.device) -> torch.Generator:
    """Return the generator that dropout on this device draws from."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator: torch.Generator = torch.cuda.default_generators[index]
        return generator
    return torch.default_generator
