"""Count the memory of tensors by category, from the operator that makes a storage to its last reference."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_cp.compat.torch_names import address_of
from lightning_cp.planning.step import CATEGORIES

Bytes = dict[str, int]  # by category


@dataclass
class Span:
    """Memory between two marks of a step, relative to its begin.

    Attributes: grown: at its end. peak: at the moment of its highest sum.
    """

    grown: Bytes = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    peak: Bytes = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))

    def change(self, category: str, change: int) -> None:
        """Allocate memory, or free it if `change` is negative."""
        self.grown[category] += change
        if change > 0 and sum(self.grown.values()) > sum(self.peak.values()):
            self.peak = dict(self.grown)


class StorageTracker:
    """Follow the storages of tensors, with or without memory of their own.

    Attributes:
        span: what is counted now. Exchange it at a mark.
        category: category of storages that are added without one.
    """

    def __init__(self) -> None:
        self.span, self.category = Span(), "activations"
        self._live: dict[int, tuple[weakref.ref[object], int, str]] = {}
        self._watched: dict[int, tuple[int, ...]] = {}  # the first storage of a unit -> all its storages

    def add(self, x: Tensor, category: str | None = None) -> None:
        """Count the storage of a tensor, unless it is counted already, or on the meta device."""
        if x.is_meta:
            return
        storage = x.untyped_storage()
        key = address_of(storage)
        if key in self._live:
            return
        size, category = storage.nbytes(), category or self.category
        self._live[key] = weakref.ref(storage, lambda _: self._free(key)), size, category
        self.span.change(category, size)

    def move(self, x: Tensor, category: str) -> None:
        """Count the storage of a tensor in another category from now on."""
        key = address_of(x.untyped_storage())
        if key not in self._live:
            return self.add(x, category)
        reference, size, before = self._live[key]
        if before != category:
            self.span.change(before, -size)
            self.span.change(category, size)
            self._live[key] = reference, size, category
        return None

    def watch(self, unit: Sequence[Tensor]) -> None:
        """Follow later changes of the size of tensors' storages, which no operator makes. All change together."""
        keys = tuple(address_of(x.untyped_storage()) for x in unit)
        self._watched[keys[0]] = keys

    def follow_resizes(self) -> None:
        """Count the sizes that watched storages have now, those that shrank first."""
        changes = []
        for first, keys in self._watched.items():
            if self._resized(first) is None:
                continue
            for key in keys:
                now = self._resized(key)
                if now is not None:
                    reference, size, category = self._live[key]
                    changes.append((now - size, category))
                    self._live[key] = reference, now, category
        for change, category in sorted(changes):
            self.span.change(category, change)

    def _resized(self, key: int) -> int | None:
        """Return the size of a storage if it has changed."""
        reference, size, _ = self._live[key]
        storage: Any = reference()
        now: int = size if storage is None else storage.nbytes()
        return None if now == size else now

    def reserve(self, category: str, size: int) -> None:
        """Count memory that no tensor of the step has."""
        self.span.change(category, size)

    def _free(self, key: int) -> None:
        _, size, category = self._live.pop(key)
        self._watched.pop(key, None)
        self.span.change(category, -size)
