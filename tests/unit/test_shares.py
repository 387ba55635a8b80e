"""The setting `shares`: what it may be, and the whole numbers that it becomes."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_cp.mesh.shares import check_shares, show_shares
from lightning_cp.strategies.settings import StrategySettings


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, None),
        ([1, 1, 1], None),
        ((0.5, 0.5, 0.5), None),
        ([2, 1, 3], (2, 1, 3)),
        ([4, 2, 2], (2, 1, 1)),
        ([0.1, 0.3, 1], (1, 3, 10)),
        ([1e300, 5e299, 5e299], (2, 1, 1)),
        ([1, 1e-300, 1], (1000000, 1, 1000000)),
        ([1 / 3, 1 / 7, 1], (333333, 142857, 1000000)),
    ],
)
def test_shares_become_whole_numbers_in_lowest_terms(given: Any, found: tuple[int, ...] | None) -> None:
    assert check_shares(given, ring=3, ulysses=1) == found
    assert show_shares(found) == ("" if found is None else f", shares {':'.join(map(str, found))}")


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ([2, 1], ValueError, r"shares=\[2, 1\] must be a list of 4 positive numbers, .*\(ring=2 x ulysses=2\)"),
        ([2, 1, 1, 0], ValueError, "positive"),
        ([2, 1, 1, -1], ValueError, "positive"),
        ([2, 1, 1, float("nan")], ValueError, "positive"),
        ([2, 1, 1, float("inf")], ValueError, "positive"),
        ([2, 1, 1, True], TypeError, "positive"),
        ([2, 1, 1, "1"], TypeError, "positive"),
        ("2111", TypeError, "shares='2111' must be a list"),
        (2, TypeError, "shares=2 must be a list"),
    ],
)
def test_other_shares_are_refused(given: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        check_shares(given, ring=2, ulysses=2)
    with pytest.raises(kind, match=text):
        StrategySettings(ring=2, ulysses=2, shares=given)
