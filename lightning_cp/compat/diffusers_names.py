"""Private names of diffusers, imported at first use, and the hooks that it puts on modules.

Nothing here imports diffusers, which takes seconds.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from lightning_cp.compat.versions import incompatible, private_names

if TYPE_CHECKING:
    from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

__all__ = ["ContextParallelInput", "ContextParallelOutput", "has_hook", "hooks_of", "register_block_subclass"]

HookKind = Literal["parallel", "cache", "offload", "cast", "guider"]

_FOLDER = "diffusers.hooks."
# Module of diffusers.hooks -> what its hooks are for. A module that is not here is refused: its hooks may keep or
# compare the tokens of one rank, which would change the result without an error.
KINDS: dict[str, HookKind] = {
    "context_parallel": "parallel",
    "tensor_parallel": "parallel",
    "tensor_parallel_neuron": "parallel",
    "faster_cache": "cache",
    "first_block_cache": "cache",
    "mag_cache": "cache",
    "pyramid_attention_broadcast": "cache",
    "sea_cache": "cache",
    "taylorseer_cache": "cache",
    "text_kv_cache": "cache",
    "group_offloading": "offload",
    "layerwise_casting": "cast",
    "layer_skip": "guider",
    "smoothed_energy_guidance_utils": "guider",
}
WITHOUT_HOOKS = ("hooks", "utils", "_common", "_helpers")  # modules of diffusers.hooks that define no hook of their own

_HOMES = {
    "ContextParallelInput": ("models._modeling_parallel", "ContextParallelInput"),
    "ContextParallelOutput": ("models._modeling_parallel", "ContextParallelOutput"),
    "templated_context_parallel_attention": ("models.attention_dispatch", "_templated_context_parallel_attention"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, original = _HOMES[name]
    with private_names("diffusers"):
        return getattr(import_module(f"diffusers.{module}"), original)


def hooks_of(module: Any) -> Iterator[tuple[HookKind | None, Any]]:
    """Yield the kind and the object of each diffusers hook on a module; kind None: a hook of the user's own class.

    Args: module: one torch module, without the modules inside it.
    Raises: IncompatibleVersionError: a hook of diffusers of an unknown kind.
    """
    registry = getattr(module, "_diffusers_hook", None)
    for hook in () if registry is None else registry.hooks.values():
        yield _kind_of(type(hook)), hook


def has_hook(module: Any, kind: HookKind) -> bool:
    """Return True if a module, or a module inside it, has a diffusers hook of this kind."""
    return any(hook_kind == kind for inner in module.modules() for hook_kind, _ in hooks_of(inner))


def register_block_subclass(kind: type, subclass: type) -> None:
    """Let diffusers' hooks find a subclass of a transformer block (FSDP makes one) like the block's own class."""
    helpers = sys.modules.get("diffusers.hooks._helpers")
    registry = None if helpers is None else helpers.TransformerBlockRegistry
    if registry is None or subclass is kind:
        return
    try:
        metadata = registry.get(kind)
    except ValueError:  # diffusers' hooks do not know the block either
        return
    registry.register(subclass, copy.copy(metadata))


def _kind_of(kind: type) -> HookKind | None:
    for base in kind.__mro__:
        if base.__module__.startswith("diffusers."):
            name = base.__module__.removeprefix(_FOLDER)
            if name in KINDS:
                return KINDS[name]
            if name in WITHOUT_HOOKS:
                return None  # the base class of all hooks
            raise incompatible(
                "diffusers", f"{base.__module__}.{base.__name__} is a hook that lightning_cp was not tested with"
            )
    return None
