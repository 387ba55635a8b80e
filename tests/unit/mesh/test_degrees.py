"""Context degrees within ring x ulysses; shares, and the whole numbers that they become."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_cp.mesh.degrees import check_degrees, check_shares, context_shape, show_shares
from lightning_cp.strategies.settings import StrategySettings


def test_a_smaller_context_group_has_neighbouring_ranks() -> None:
    assert [context_shape(n, ring=2, ulysses=4) for n in (1, 2, 4, 8)] == [(1, 1), (1, 2), (1, 4), (2, 4)]
    assert [context_shape(n, ring=4, ulysses=1) for n in (1, 2, 4)] == [(1, 1), (2, 1), (4, 1)]
    assert [context_shape(n, ring=3, ulysses=2) for n in (1, 2, 6)] == [(1, 1), (1, 2), (3, 2)]


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({64: 3}, r"3 is no context degree within ring=2 x ulysses=2: it must be one of \[1, 2, 4\]"),
        ({64: 8}, r"8 is no context degree"),
        ({64: 0}, r"0 must be a whole number of at least 1"),
        ({0: 1}, r"0 must be a whole number of at least 1"),
        ({64: 2, 128: 1}, r"longer samples must have the same or a larger degree"),
        ([1, 2], r"must be a dict"),
    ],
)
def test_invalid_degrees_are_named(degrees: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        check_degrees(degrees, ring=2, ulysses=2)


def test_degrees_need_the_usual_mesh_and_equal_devices() -> None:
    check_degrees({128: 2, 64: 1}, ring=2, ulysses=2, grid=(1, 2))
    with pytest.raises(ValueError, match="'auto' does not work with grid"):
        check_degrees("auto", ring=1, ulysses=1, grid=(1, 2))
    with pytest.raises(ValueError, match="does not work with shares"):
        check_degrees({64: 1}, ring=2, ulysses=1, shares=(2, 1))


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
