"""Trained weights as plain diffusers loads them: folders for `from_pretrained`, LoRA for `load_lora_weights`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lightning_cp.checkpoint.folder import written_whole

LORA_FILE = "pytorch_lora_weights.safetensors"


def save_pretrained(
    transformer: nn.Module, folder: str | Path, *, dtype: torch.dtype | None = None, **how: Any
) -> None:
    """Writes what `type(transformer).from_pretrained(folder)` reads. Call it on every rank; the first one writes.

    The transformer stays as it is: context-parallel, sharded, wrapped for DDP or by Fabric, compiled block by block.
    For averaged weights call it inside `average.swapped_in(module)`.

    Args:
        transformer: a diffusers model.
        folder: an older model in it is replaced when all is written; other files stay.
        dtype: of the file's floating-point weights; None keeps those of the model.
        how: passed on to diffusers' `save_pretrained` (`max_shard_size`, `variant`).
    Raises:
        TypeError: it is no diffusers model.
        ValueError: it holds adapters: use `save_lora`, or merge them first.
        RuntimeError: the first rank could not write (OSError in a run of one process).
    Ranks: the whole world.
    """
    model: Any = _unwrapped(transformer)
    if getattr(model, "peft_config", None):
        names = ", ".join(model.peft_config)
        raise ValueError(f"{type(model).__name__} holds adapters ({names}): use save_lora, or merge them first")
    state = _whole_state(model, dtype=dtype)

    def write() -> None:
        with torch.device("meta"):
            plain = type(model).from_config(model.config)
        plain.load_state_dict(state, strict=True, assign=True)
        with written_whole(Path(folder), replaces="diffusion_pytorch_model*") as scratch:
            plain.save_pretrained(scratch, safe_serialization=True, **how)

    _on_first_rank(write)


def save_lora(
    transformer: nn.Module,
    folder: str | Path,
    *,
    adapter: str = "default",
    component: str = "transformer",
    dtype: torch.dtype | None = None,
) -> None:
    """Writes an adapter as `pipeline.load_lora_weights(folder)` reads it. Call it on every rank; the first one writes.

    Args:
        transformer: a diffusers model with adapters, as `add_adapter` gives it one; see `save_pretrained`.
        folder: an older adapter in it is replaced when all is written; other files stay.
        adapter: its name.
        component: of the pipeline that it belongs to.
        dtype: of the file's weights; None keeps those of the model.
    Raises:
        TypeError: it is no diffusers model.
        ValueError: it has no adapter of this name.
    Ranks: the whole world.
    """
    from diffusers.loaders.lora_base import LoraBaseMixin
    from peft import get_peft_model_state_dict

    model: Any = _unwrapped(transformer)
    adapters = getattr(model, "peft_config", None) or {}
    if adapter not in adapters:
        raise ValueError(f"adapter={adapter} is not valid: {type(model).__name__} has {', '.join(adapters) or 'none'}")
    state = _whole_state(model, dtype=dtype)

    def write() -> None:
        layers = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
        with written_whole(Path(folder)) as scratch:
            LoraBaseMixin.write_lora_layers(
                state_dict={f"{component}.{name}": x.contiguous() for name, x in layers.items()},
                save_directory=str(scratch),
                is_main_process=True,
                weight_name=LORA_FILE,
                save_function=None,
                safe_serialization=True,
                lora_adapter_metadata={f"{component}.{key}": x for key, x in adapters[adapter].to_dict().items()},
            )

    _on_first_rank(write)


def _unwrapped(module: nn.Module) -> nn.Module:
    """The diffusers model that Fabric, DDP and `torch.compile` have wrapped. Raises: TypeError: there is none."""
    from diffusers import ModelMixin

    found: Any = module
    while not isinstance(found, ModelMixin):
        inner = getattr(found, "_orig_mod", None) or getattr(found, "module", None)
        if not isinstance(inner, nn.Module):
            raise TypeError(f"{type(module).__name__} is no diffusers model: give the transformer itself")
        found = inner
    return found  # type: ignore[no-any-return]


def _on_first_rank(write: Callable[[], None]) -> None:
    """When it returns, or raises, on any rank, the first one has written, or could not."""
    if not dist.is_initialized():
        write()
        return
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            write()
        except Exception as error:
            failure = [f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise RuntimeError(f"the first rank could not export: {failure[0]}")


def _whole_state(model: nn.Module, *, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """All weights on the CPU, on the first rank; nothing on the others. Call it on every rank."""
    state: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return {name: x.to(dtype) if dtype is not None and x.is_floating_point() else x for name, x in state.items()}
