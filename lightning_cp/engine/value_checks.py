"""Check the values of a forward's arguments: directly, or as a custom operator in compiled code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lightning_cp.engine.session import Session
from lightning_cp.errors import ShapeError

_ARGUMENT, _LEAF = "\x1e", "\x1f"  # separators of arguments, and of the leaves of an argument
_SESSIONS: WeakValueDictionary[int, Session] = WeakValueDictionary()  # custom operators take numbers, not objects


def check_arguments(arguments: Mapping[str, Any], session: Session, *, model: str) -> None:
    """Compare arguments between ranks and check masks, in the forwards that `check_peers` selects.

    Args: given: arguments by name. model: name of the model, for errors.
    Ranks: all of the context group. Raises: PeerMismatchError, ShapeError.
    """
    if session.peers.compares_in_full:
        for name, reason in session.rules.leading.items():
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
