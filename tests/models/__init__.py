"""Tiny models of every class with a plan: a file for each file of lightning_cp/plans, with a table `TINY`."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from tests.models.tiny import Tiny

FAMILIES: dict[str, dict[str, Tiny]] = {
    module.name: import_module(f"{__name__}.{module.name}").TINY
    for module in pkgutil.iter_modules(__path__)
    if module.name not in ("tiny", "modes", "table") and not module.name.startswith("test_")
}
TINY: dict[str, Tiny] = {name: tiny for family in FAMILIES.values() for name, tiny in family.items()}
FIRST: dict[str, str] = {tiny.kind: name for name, tiny in reversed(TINY.items())}  # of each class, its first entry
