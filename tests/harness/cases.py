"""Choose the cases of a parametrized test that run without the marker `full`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def full_unless(keep: Callable[..., bool], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Mark the cases for which `keep(*case)` is False with `full`."""
    return [case if keep(*case) else pytest.param(*case, marks=pytest.mark.full) for case in cases]
