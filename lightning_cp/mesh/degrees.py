"""Check settings of a context group: degrees that steps choose between, and shares of ranks. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from lightning_cp.rules import Integer

AUTO = "auto"  # let the planner choose ring and Ulysses degrees
Shares = tuple[int, ...]
_LARGEST = 10**6  # weights are rounded to 6 digits, so that their products with token counts fit 64 bits


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


def check_degrees(degrees: Any, *, ring: int, ulysses: int, grid: object = None, **others: object) -> None:
    """Check the setting `degrees`: largest number of tokens -> context degree, or "auto".

    Args: grid: must be None with "auto". others: settings that must be None with any degrees, by name.
    Raises: TypeError, ValueError: the message names the setting, its value and what is valid.
    """
    if degrees is None:
        return
    if degrees == AUTO:
        if (ring, ulysses) != (1, 1):
            raise ValueError(f"degrees='auto' chooses ring={ring} and ulysses={ulysses}: leave them out")
        _check_alone("'auto'", grid=grid, **others)
        return
    if not isinstance(degrees, Mapping):
        raise TypeError(
            f"degrees={degrees!r} must be a dict from numbers of tokens to degrees, such as {{4096: 1}}, or 'auto'"
        )
    _check_alone(dict(degrees), **others)
    for tokens, degree in degrees.items():
        for value in (tokens, degree):
            if not Integer(1).passes(value):
                raise ValueError(f"degrees={dict(degrees)!r}: {value!r} must be a whole number of at least 1")
        context_shape(degree, ring=ring, ulysses=ulysses)
    by_tokens = [degrees[tokens] for tokens in sorted(degrees)]
    if by_tokens != sorted(by_tokens):
        raise ValueError(f"degrees={dict(degrees)!r}: longer samples must have the same or a larger degree")


def _check_alone(degrees: object, **others: object) -> None:
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"degrees={degrees} does not work with {name}: leave one of them out")


def check_shares(shares: object, *, ring: int, ulysses: int) -> Shares | None:
    """Check the setting `shares`, and return it as whole numbers in lowest terms: (0.5, 1) gives (1, 2).

    Args: shares: a positive number for each rank of the context group, in rank order (ring-major); None: equal.
    Returns: None if all are equal. Raises: TypeError, ValueError: anything else.
    """
    if shares is None:
        return None
    expected = (
        f"must be a list of {ring * ulysses} positive numbers, one for each rank of the context group "
        f"(ring={ring} x ulysses={ulysses}), in rank order"
    )
    if isinstance(shares, str) or not isinstance(shares, Sequence):
        raise TypeError(f"shares={shares!r} {expected}; None means equal shares")
    weights = list(shares)
    if any(isinstance(share, bool) or not isinstance(share, (int, float)) for share in weights):
        raise TypeError(f"shares={weights} {expected}")
    if len(weights) != ring * ulysses or not all(math.isfinite(share) and share > 0 for share in weights):
        raise ValueError(f"shares={weights} {expected}")
    exact = [Fraction(str(share)) for share in weights]
    if len(set(exact)) == 1:
        return None
    return _lowest(exact) if max(_lowest(exact)) <= _LARGEST else _lowest(_rounded(exact))


def show_shares(shares: Shares | None) -> str:
    """Return the text for log lines: ", shares 2:1"; empty for equal shares."""
    return "" if shares is None else f", shares {':'.join(map(str, shares))}"


def _rounded(exact: Sequence[Fraction]) -> list[Fraction]:
    return [Fraction(max(1, round(share * _LARGEST / max(exact)))) for share in exact]


def _lowest(exact: Sequence[Fraction]) -> Shares:
    scale = math.lcm(*(share.denominator for share in exact))
    whole = [int(share * scale) for share in exact]
    return tuple(share // math.gcd(*whole) for share in whole)
