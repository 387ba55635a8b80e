"""Run the forward of a parallel model: check and split its arguments, begin and end a `Call`, gather its outputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from lightning_cp.attention.sparse.handles import handle_of, is_block_mask
from lightning_cp.comm.lost_connections import is_failed_exchange
from lightning_cp.comm.stats import STATS
from lightning_cp.compat.compiler import uncompiled
from lightning_cp.compat.torch_names import is_exporting
from lightning_cp.engine.attention.outside_blocks import MissedCalls
from lightning_cp.engine.attention.replay import Replay
from lightning_cp.engine.attention.scope import SCOPE, Scope
from lightning_cp.engine.hook_base import EngineHook, refuse_arguments
from lightning_cp.engine.model_plan import ModelPlan
from lightning_cp.engine.paths import is_compiled
from lightning_cp.engine.session import Call, Session
from lightning_cp.engine.sharding.sharders import ArgumentHook, OutputHook, missing_split, shard_before_checkpoint
from lightning_cp.errors import InterceptionError, PlanError, ShapeError
from lightning_cp.nest import named_leaves, tensors

_ARGUMENT, _LEAF = "\x1e", "\x1f"  # separators of arguments, and of the leaves of an argument
_SESSIONS: WeakValueDictionary[int, Session] = WeakValueDictionary()  # custom operators take numbers, not objects


def check_arguments(arguments: Mapping[str, Any], session: Session, *, model: str) -> None:
    """Compare arguments between ranks and check masks, in the forwards that `check_peers` selects.

    Args: given: arguments by name. model: name of the model, for errors.
    Ranks: all of the context group. Raises: PeerMismatchError, ShapeError.
    """
    if session.peers.compares_in_full:
        for name, reason in session.model_plan.leading.items():
            mask = arguments.get(name)
            if isinstance(mask, Tensor) and bool((mask[:, 1:] > mask[:, :-1]).any()):
                raise ShapeError(f"{name} must keep the first tokens of each sample ({reason}): move padding last")
    session.peers.check(dict(arguments), model=model)


def check_in_graph(arguments: Mapping[str, Any], session: Session, *, model: str) -> None:
    """Add `check_arguments` to the graph being traced, to run it in every forward of the compiled model."""
    values: list[Tensor] = []
    layout: list[str] = []
    for name, value in arguments.items():
        kinds: list[str] = []
        _collect(value, values, kinds)
        shape = "nest" if isinstance(value, (list, tuple, dict)) else "leaf"
        if kinds:
            layout.append(_LEAF.join([name, shape, *kinds]))
    torch.ops.lightning_cp.check_forward(
        values, _ARGUMENT.join(layout), model, session.number, session.num_graph_checks
    )


def register_session(session: Session) -> None:
    """Register a session, so that the operator finds it by its number."""
    _SESSIONS[session.number] = session


@torch.library.custom_op("lightning_cp::check_forward", mutates_args=("checked",))
def _check_forward(values: Sequence[Tensor], layout: str, model: str, number: int, checked: Tensor) -> None:
    """Run `check_arguments`, and count in `checked`: the compiler would remove an operator that writes nothing."""
    session = _SESSIONS.get(number)
    checked.add_(1)
    if session is None or session.groups.context is None:
        return
    arguments: dict[str, Any] = {}
    rest = iter(values)
    for entry in layout.split(_ARGUMENT) if layout else ():
        name, shape, *kinds = entry.split(_LEAF)
        leaves = [_leaf(kind, rest) for kind in kinds]
        arguments[name] = leaves if shape == "nest" else leaves[0]
    check_arguments(arguments, session, model=model)
    session.peers.start()


@_check_forward.register_fake
def _(values: Sequence[Tensor], layout: str, model: str, number: int, checked: Tensor) -> None:
    return None


def _collect(value: Any, values: list[Tensor], kinds: list[str]) -> None:
    """Collect the leaves of an argument. Numbers become tensors, because the compiler may make them variable.

    Args:
        values: gets tensors, and numbers as scalar tensors.
        kinds: gets "tensor", "int", "float", or the text of a string or bool, for each leaf.
    """
    if isinstance(value, Tensor):
        values.append(value.detach())
        kinds.append("tensor")
    elif isinstance(value, (bool, str)):
        kinds.append(f"{value!r}")  # its quotes distinguish a string from a kind; it has no control characters
    elif isinstance(value, (int, float)):
        is_int = isinstance(value, int)
        # The sum keeps the value variable: of torch.full inductor makes a constant, of torch.tensor a graph per value.
        zero = torch.zeros((), dtype=torch.int64 if is_int else torch.float64, device="cpu")
        values.append(zero + value)
        kinds.append("int" if is_int else "float")
    elif isinstance(value, (list, tuple)):
        for x in value:
            _collect(x, values, kinds)
    elif isinstance(value, dict):
        for x in value.values():
            _collect(x, values, kinds)


def _leaf(kind: str, values: Iterator[Tensor]) -> Any:
    """Return the next leaf of an argument; see `_collect`."""
    if kind == "tensor":
        return next(values)
    return next(values).item() if kind in ("int", "float") else kind


@dataclass(eq=False)
class ModelHook(EngineHook):
    """Run the model's forward in a new `Call`; split the model's arguments and gather its outputs.

    Attributes:
        signature: signature of the model's forward.
        scope: scope outside of blocks.
        checkpointing: modules with a `gradient_checkpointing` attribute.
        padding: a `PadHook` for plans that pad, otherwise None.
        describes_attention: False for plans in diffusers' format.
    """

    session: Session
    signature: Any
    model_plan: ModelPlan
    scope: Scope
    checkpointing: list[nn.Module]
    padding: Any = None
    arguments: Sequence[ArgumentHook] = ()
    outputs: Sequence[OutputHook] = ()

    def __post_init__(self) -> None:
        self.describes_attention = None not in self.model_plan.attention.values()

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the model's original forward.

        Session and checkpointing functions are restored afterwards, also after a KeyboardInterrupt. (Forward hooks of
        torch with `always_call` run after every `Exception`, which a KeyboardInterrupt is not.)
        """
        arguments = self.before(module, args, kwargs)
        session = self.session
        around, entry = SCOPE.current, SCOPE.entry
        if around is not None and around.session is session and not session.forwards:
            around = entry = None  # of an interrupted recomputation, too
        call = Call(
            session.groups, session.peers, session.evaluation, self.describes_attention, torch.is_grad_enabled()
        )
        outer = session.begin(call)
        SCOPE.current, SCOPE.entry = self.scope, None
        checkpoints: list[tuple[nn.Module, Any]] = []
        try:
            self._record_unsplit_lengths(arguments)
            self._add_handles(arguments)
            self._wrap_checkpoints(checkpoints)
            if self.padding is not None:
                args, kwargs = self.padding.before(module, args, kwargs)
            for hook in self.arguments:
                args, kwargs = hook.before(module, args, kwargs)
            output = self._call(module, forward, args, kwargs)
            for output_hook in self.outputs:
                output = output_hook.after(module, args, output)
            self.after(module)
            session.succeeded = True
            return output
        except (RuntimeError, ValueError, IndexError) as error:
            self._explain(error)
            raise
        finally:
            for inner, original in checkpoints:
                inner._gradient_checkpointing_func = original
            call.shards.clear()  # the call itself is kept until backward, for recomputations
            session.end(outer)
            SCOPE.current, SCOPE.entry = around, entry
            STATS.leave()

    def _call(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Call the forward; the first one in training, and in evaluation, is checked for missed attention calls."""
        session, training = self.session, module.training
        if torch.compiler.is_compiling() or training not in session.unchecked or session.groups.context is None:
            return forward(*args, **kwargs)
        if any(is_compiled(inner) for inner in module.modules() if inner is not module):
            session.unchecked.clear()  # the check would be compiled too
            return forward(*args, **kwargs)
        with MissedCalls(session):
            output = forward(*args, **kwargs)
        if session.current().lengths:
            session.unchecked.discard(training)
        return output

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Check the arguments before the forward. Returns: the arguments by name."""
        arguments = self._given(args, kwargs)
        STATS.enter(module, module)
        self._check(arguments, model=type(module).__name__)
        return arguments

    def after(self, module: nn.Module) -> None:
        """Check a forward that has succeeded. Raises: InterceptionError: none of its attention was intercepted."""
        session, call = self.session, self.session.current()
        if call.lengths and not torch.compiler.is_compiling():
            session.peers.start()  # not yet started if a compiled block has split the first tensor
        if not self.model_plan.main and not call.intercepted and call.lengths:
            raise InterceptionError(
                f"{type(module).__name__} ran on shards, but none of its attention passed through lightning_cp, so its "
                "result would be wrong: it must go through dispatch_attention_fn or F.scaled_dot_product_attention"
            )

    def _explain(self, error: Exception) -> None:
        """Raise PlanError if an error in the model's code may come from an argument that the plan does not split."""
        call, builtin = self.session.current(), type(error) in (RuntimeError, ValueError, IndexError)
        is_of_model = builtin and not is_failed_exchange(str(error))
        missing = missing_split(call) if is_of_model and not self.session.succeeded else None
        if missing is not None:
            raise PlanError(
                f"{call.block} failed on shards ({type(error).__name__}: {error}), and its plan leaves out an argument "
                f"that may have to be split: {missing}. Add it to the plan: split(dim, modalities), mask(modalities) "
                "or ContextParallelInput"
            ) from error

    def _record_unsplit_lengths(self, arguments: dict[str, Any]) -> None:
        split = {name for rule in self.model_plan.arguments if "" in rule.paths for name in rule.specs}
        for name, value in arguments.items():
            if name not in split:
                self.session.current().unsplit_lengths.update(x.shape[1] for x in tensors(value) if x.ndim == 3)

    def _add_handles(self, arguments: dict[str, Any]) -> None:
        """Make the handles of block masks in the arguments, so that compiled blocks need no graph break for them."""
        if not torch.compiler.is_compiling():
            for _, value in named_leaves("", arguments):
                if is_block_mask(value):
                    handle_of(value)

    def _wrap_checkpoints(self, checkpoints: list[tuple[nn.Module, Any]]) -> None:
        """Wrap checkpoint functions, so that recomputed blocks use the `Call` of their forward.

        Compiled code needs no wrapper: its recomputation runs the traced operators.
        """
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
            split = shard_before_checkpoint(block, args, kwargs, session.current())
            replay = Replay(session, session.call, SCOPE.current, block, is_split=split is not None)
            args, kwargs = (args, kwargs) if split is None else split
            return original(replay, *args, **kwargs)

        return checkpoint

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments by name; none if they do not fit the forward, which then raises the error."""
        try:
            arguments = self.signature.bind_partial(None, *args, **kwargs).arguments
        except TypeError:
            return {}
        return {name: x for name, x in arguments.items() if name != next(iter(self.signature.parameters))}

    def _check(self, arguments: dict[str, Any], *, model: str) -> None:
        session = self.session
        for name, reason in self.model_plan.required.items():
            if arguments and arguments.get(name) is None:
                raise ShapeError(f"{name} must be given to a context-parallel model: {reason}")
        refuse_arguments(self.model_plan.refused, arguments)
        if not torch.compiler.is_compiling():
            uncompiled(check_arguments)(arguments, session, model=model)
        elif session.groups.context is not None and session.peers.is_on:
            if is_exporting():  # AOTInductor cannot compile the comparison
                warnings.warn(
                    f"an exported {model} does not compare its arguments between ranks: pass the same on all ranks of "
                    "a context group",
                    stacklevel=2,
                )
            else:
                check_in_graph(arguments, session, model=model)
