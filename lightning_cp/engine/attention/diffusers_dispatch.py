"""diffusers' attention dispatcher and registry of backends, for models that contain modules of diffusers."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from torch import nn

from lightning_cp.engine.session import Session
from lightning_cp.errors import InterceptionError
from lightning_cp.kernels import kernel_of_backend


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


def kernel_for(session: Session, backend: Any) -> str:
    """Choose the session's kernel; if that is "auto", the kernel of diffusers' backend.

    The backend is the processor's (`backend`), or the active one of diffusers' registry if the processor has none.

    Raises: InterceptionError: a backend that the plan refuses, because the model's code has special cases for it.
    """
    if backend is None and session.backends is not None:
        backend = session.backends._active_backend
    name = getattr(backend, "value", backend)
    refused = session.model_plan.refused_backends
    if name in refused:
        raise InterceptionError(
            f"attention backend {name!r} cannot be used context-parallel with this class ({refused[name]}): set "
            "another backend"
        )
    if session.kernel != "auto":
        return session.kernel
    return "auto" if backend is None else kernel_of_backend(name)
