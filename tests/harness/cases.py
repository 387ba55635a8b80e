"""Choose the cases of a parametrized test: few of a product, and which run without the marker `full`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import combinations, product
from typing import Any, TypeVar

_T = TypeVar("_T")


def in_turn(*axes: Collection[Any]) -> list[tuple[Any, ...]]:
    """Return as many cases as the longest axis has values; the values of the other axes take turns."""
    values = [list(axis) for axis in axes]
    return [tuple(axis[i % len(axis)] for axis in values) for i in range(max(map(len, values)))]


def and_others(cases: Iterable[_T], number: int = 1) -> list[list[_T]]:
    """Return groups of one case each, so many, and one group of all others: the groups of cheap cases of one table."""
    given = list(cases)
    return [*([case] for case in given[:number]), given[number:]]


def grouped(cases: Iterable[_T], key: Callable[[_T], str]) -> dict[str, list[_T]]:
    """Return the cases by `key(case)`: one test tries those of a group one after another."""
    groups: dict[str, list[_T]] = {}
    for case in cases:
        groups.setdefault(key(case), []).append(case)
    return groups


def pairwise(*axes: Collection[Any], valid: Callable[..., bool] = lambda *case: True) -> list[tuple[Any, ...]]:
    """Return cases in which each value of an axis meets each value of every other axis, as far as `valid(*case)`."""
    rest, chosen = [case for case in product(*axes) if valid(*case)], []
    missing = {pair for case in rest for pair in combinations(enumerate(case), 2)}
    while missing:
        best = max(rest, key=lambda case: len(missing & {*combinations(enumerate(case), 2)}))
        missing -= {*combinations(enumerate(best), 2)}
        chosen.append(best)
    return chosen
