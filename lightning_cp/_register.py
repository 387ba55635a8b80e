"""Register our strategies with Lightning, without importing it early (the import takes seconds)."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# Lightning's module -> (name of its registry, our module with the strategy for it).
_REGISTRIES = {
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "lightning_cp.fabric"),
    "lightning.pytorch.strategies": ("StrategyRegistry", "lightning_cp.pytorch"),
}
# Registered name -> axis that takes all ranks; None: the degrees are given as settings.
_WHOLE_WORLD = {"cp": None, "cp_ring": "ring", "cp_ulysses": "ulysses"}


def _build(module: str, **settings: Any) -> object:
    return import_module(module).ContextParallelStrategy(**settings)


def _register(module: ModuleType) -> None:
    registry_name, module_name = _REGISTRIES[module.__name__]
    registry = getattr(module, registry_name)
    for name, whole_world in _WHOLE_WORLD.items():
        if name not in registry:
            registry.register(
                name,
                partial(_build, module_name),
                description="context parallelism of transformers",
                whole_world=whole_world,
            )


class _AfterImport(MetaPathFinder, Loader):
    """Import hook: let Lightning's modules load, then register the strategies."""

    def __init__(self) -> None:
        self._loaders: dict[str, Any] = {}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in _REGISTRIES or fullname in self._loaders:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            self._loaders[fullname], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loaders[spec.name].create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._loaders[module.__name__].exec_module(module)
        _register(module)


def register_strategies() -> None:
    """Register the strategies now if Lightning is imported; otherwise when it is imported."""
    for name in _REGISTRIES:
        if name in sys.modules:
            _register(sys.modules[name])
    if any(name not in sys.modules for name in _REGISTRIES):
        sys.meta_path.insert(0, _AfterImport())
