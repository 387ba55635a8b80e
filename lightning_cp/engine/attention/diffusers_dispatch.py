"""diffusers' attention dispatcher and registry of backends, for models that contain modules of diffusers."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from torch import nn


def backends_of(module: nn.Module) -> Any:
    """Return diffusers' registry of attention backends; None for a model without any module of diffusers."""
    dispatch_module = _dispatch_module(module)
    return None if dispatch_module is None else dispatch_module._AttentionBackendRegistry


def _dispatch_module(module: nn.Module) -> ModuleType | None:
    if not any(_is_diffusers(inner) for inner in module.modules()):
        return None
    return sys.modules.get("diffusers.models.attention_dispatch")


def _is_diffusers(module: nn.Module) -> bool:
    processor = getattr(module, "processor", None)
    kinds = (*type(module).__mro__, *type(processor).__mro__)
    return any(base.__module__.split(".")[0] == "diffusers" for base in kinds)
