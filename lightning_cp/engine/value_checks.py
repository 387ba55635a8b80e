"""Check the values of a forward's arguments: directly, or as a custom operator in compiled code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lightning_cp.engine.session import Session
from lightning_cp.errors import ShapeError

_SESSIONS: WeakValueDictionary[int, Session] = WeakValueDictionary()  # custom operators take numbers, not objects


def check_values(given: Mapping[str, Any], session: Session, *, model: str) -> None:
    """Compare arguments between ranks and check masks, in the forwards that `check_peers` selects.

    Args: given: arguments by name. model: name of the model, for errors.
    Ranks: all of the context group. Raises: PeerMismatchError, ShapeError.
    """
    if session.peers.compares_in_full:
        for name, reason in session.rules.leading.items():
            mask = given.get(name)
            if isinstance(mask, Tensor) and bool((mask[:, 1:] > mask[:, :-1]).any()):
                raise ShapeError(f"{name} must keep the first tokens of each sample ({reason}): move padding last")
    session.peers.check(dict(given), model=model)


def check_in_graph(given: Mapping[str, Any], session: Session, *, model: str) -> None:
    """Add `check_values` to the graph being traced, to run it in every forward of the compiled model."""
    values: list[Tensor] = []
    layout: list[str] = []
    for name, value in given.items():
        found: list[Tensor] = []
        _collect(value, found)
        if found:
            layout.append(f"{name}:{'one' if isinstance(value, Tensor) else len(found)}")
            values += [x.detach() for x in found]
    torch.ops.lightning_cp.check_forward(values, ",".join(layout), model, session.number, session.num_graph_checks)


def register(session: Session) -> None:
    """Register a session, so that the operator finds it by its number."""
    _SESSIONS[session.number] = session


@torch.library.custom_op("lightning_cp::check_forward", mutates_args=("checked",))
def _check_forward(values: Sequence[Tensor], layout: str, model: str, number: int, checked: Tensor) -> None:
    """Run `check_values`, and count in `checked`: the compiler would remove an operator that writes nothing."""
    session = _SESSIONS.get(number)
    checked.add_(1)
    if session is None or session.groups.context is None:
        return
    given: dict[str, Any] = {}
    rest = list(values)
    for entry in layout.split(",") if layout else ():
        name, _, count = entry.partition(":")
        many = 1 if count == "one" else int(count)
        given[name], rest = (rest[0] if count == "one" else rest[:many]), rest[many:]
    check_values(given, session, model=model)
    session.peers.start()


@_check_forward.register_fake
def _(values: Sequence[Tensor], layout: str, model: str, number: int, checked: Tensor) -> None:
    return None


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for x in value:
            _collect(x, found)
    elif isinstance(value, dict):
        for x in value.values():
            _collect(x, found)
