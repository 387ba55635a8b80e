"""Tiny pipelines of diffusers: one file for each family, with a table `TINY` of pipelines."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from tests.pipelines.tiny import TinyPipe

_SHARED = ("common", "media", "report", "text", "tiny", "vaes", "test_")


def names() -> list[str]:
    """Names of the files with a table."""
    found = [module.name for module in pkgutil.iter_modules(__path__)]
    return [name for name in found if not name.startswith(_SHARED)]


def table(family: str) -> dict[str, TinyPipe]:
    """The table of one file. (Each imports classes of diffusers and transformers, which takes seconds.)"""
    found: dict[str, TinyPipe] = import_module(f"{__name__}.{family}").TINY
    return found
