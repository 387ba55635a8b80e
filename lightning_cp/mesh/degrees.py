"""Context degrees that the steps of one job choose between. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_cp.rules import Integer

AUTO = "auto"  # let the planner choose ring and Ulysses degrees


def context_shape(degree: int, *, ring: int, ulysses: int) -> tuple[int, int]:
    """Return (ring, ulysses) of a smaller context group. Its ranks are neighbours in a group of ring x ulysses.

    Raises: ValueError: `degree` does not divide the group in this way.
    """
    shapes = [(1, n) for n in range(1, ulysses + 1) if not ulysses % n]
    shapes += [(n, ulysses) for n in range(2, ring + 1) if not ring % n]
    by_degree = {shape[0] * shape[1]: shape for shape in shapes}
    if degree not in by_degree:
        raise ValueError(
            f"degrees: {degree} is no context degree within ring={ring} x ulysses={ulysses}: it must be one of "
            f"{list(by_degree)}"
        )
    return by_degree[degree]


def check_degrees(degrees: Any, *, ring: int, ulysses: int, mesh: object = None, shares: object = None) -> None:
    """Check the setting `degrees`: largest number of tokens -> context degree, or "auto".

    Raises: TypeError, ValueError: the message names the setting, its value and what is valid.
    """
    if degrees is None:
        return
    if degrees == AUTO:
        if (ring, ulysses) != (1, 1):
            raise ValueError(f"degrees='auto' chooses ring={ring} and ulysses={ulysses}: leave them out")
        _check_alone("'auto'", mesh=mesh, shares=shares)
        return
    if not isinstance(degrees, Mapping):
        raise TypeError(
            f"degrees={degrees!r} must be a dict from numbers of tokens to degrees, such as {{4096: 1}}, or 'auto'"
        )
    for tokens, degree in degrees.items():
        for value in (tokens, degree):
            if not Integer(1).passes(value):
                raise ValueError(f"degrees={dict(degrees)!r}: {value!r} must be a whole number of at least 1")
        context_shape(degree, ring=ring, ulysses=ulysses)
    by_tokens = [degrees[tokens] for tokens in sorted(degrees)]
    if by_tokens != sorted(by_tokens):
        raise ValueError(f"degrees={dict(degrees)!r}: longer samples must have the same or a larger degree")
    _check_alone(dict(degrees), mesh=mesh, shares=shares)


def _check_alone(degrees: object, **others: object) -> None:
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"degrees={degrees} does not work with {name}: leave one of them out")
