"""Values that are derived from an object once, and kept as long as the object."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Keeper:
    """Base of objects that keep what was derived from them. Attributes: kept: values by facts, see `keep`."""

    kept: dict[Hashable, Any]

    def keep(self, facts: Hashable, build: Callable[[], T]) -> T:
        """Return what was built for these facts before, or build it; kept as long as the object."""
        if facts not in self.kept:
            self.kept[facts] = build()
        value: T = self.kept[facts]
        return value
