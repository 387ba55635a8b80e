"""Puts our strategies into Lightning's registry, without importing it (which takes seconds) early."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_STRATEGIES = "lightning.fabric.strategies"
_NAMES = {"cp": None, "cp_ring": "ring", "cp_ulysses": "ulysses"}


def _fabric_strategy(**settings: Any) -> Any:
    from lightning_cp.fabric import ContextParallelStrategy

    return ContextParallelStrategy(**settings)


def _register(module: ModuleType) -> None:
    registry = module.STRATEGY_REGISTRY
    for name, whole_world in _NAMES.items():
        if name not in registry:
            registry.register(
                name, _fabric_strategy, description="context parallelism of transformers", whole_world=whole_world
            )


class _AfterImport(MetaPathFinder, Loader):
    """Lets Lightning's module load as always, then registers."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _STRATEGIES:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            self._inner, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _register(module)


def register() -> None:
    """Register now if Lightning is imported, else when it will be."""
    if _STRATEGIES in sys.modules:
        _register(sys.modules[_STRATEGIES])
    else:
        sys.meta_path.insert(0, _AfterImport())
