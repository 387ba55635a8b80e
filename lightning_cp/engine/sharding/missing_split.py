"""Find arguments that a plan may have left out, to explain an error that a block's code raised on shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from lightning_cp.engine.session import Call
from lightning_cp.nest import named_tensors

Shapes = dict[str, tuple[int, ...]]


def unplanned_shapes(
    order: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], planned: Mapping[str, object]
) -> Shapes:
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
