"""Check `shares`: the weight of each rank of a context group, by which tokens and heads are divided.

Imports nothing: bad settings fail before any slow import.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

Shares = tuple[int, ...]

_LARGEST = 10**6  # weights are rounded to 6 digits, so that their products with token counts fit 64 bits


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
