"""Export trained weights for plain diffusers: folders for `from_pretrained`, LoRA for `load_lora_weights`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lightning_cp.checkpoint.folder import atomic_folder
from lightning_cp.comm.agree import text_of
from lightning_cp.errors import ExportError
from lightning_cp.training.ema import gather_on_first_rank

__all__ = ["save_lora", "save_pretrained"]

LORA_FILE = "pytorch_lora_weights.safetensors"
_DISK_ERRORS = (OSError, SafetensorError)  # safetensors has an error of its own for a full disk


def save_pretrained(
    transformer: nn.Module, folder: str | Path, *, dtype: torch.dtype | None = None, **save_settings: Any
) -> None:
    """Save a model for `type(transformer).from_pretrained(folder)`. Call it on every rank; rank 0 writes.

    The transformer is not changed. It may be context-parallel, sharded, wrapped by DDP or Fabric, compiled by block.
    To export EMA weights, call it inside `average.swapped_in(module)`.

    Args:
        transformer: a diffusers model.
        folder: output folder. An older model in it is replaced after all files are written; other files stay.
        dtype: dtype of the saved floating-point weights; None: the model's dtypes.
        save_settings: arguments of diffusers' `save_pretrained` (`max_shard_size`, `variant`).
    Raises:
        TypeError: `transformer` is not a diffusers model.
        ValueError: the model holds adapters: use `save_lora`, or merge them first.
        ExportError, on every rank: rank 0 could not write.
    Ranks: the whole world.
    """
    model: Any = diffusers_model_of(transformer)
    if getattr(model, "peft_config", None):
        names = ", ".join(model.peft_config)
        raise ValueError(f"{type(model).__name__} has adapters ({names}): use save_lora, or merge them first")
    state = _full_state(model, dtype=dtype)

    def write() -> None:
        with torch.device("meta"):
            plain = type(model).from_config(model.config)
        plain.load_state_dict(state, strict=True, assign=True)
        with atomic_folder(Path(folder), replaces="diffusion_pytorch_model*") as scratch:
            plain.save_pretrained(scratch, safe_serialization=True, **save_settings)

    on_rank_zero(write)


def save_lora(
    transformer: nn.Module | Mapping[str, nn.Module],
    folder: str | Path,
    *,
    adapter: str = "default",
    component: str = "transformer",
    dtype: torch.dtype | None = None,
) -> None:
    """Save an adapter for `pipeline.load_lora_weights(folder)`. Call it on every rank; rank 0 writes.

    Args:
        transformer: a diffusers model with an adapter (from `add_adapter`, for example); see `save_pretrained`. Several
            by their names in the pipeline, as the experts of Wan 2.2, are saved in one file.
        folder: output folder. An older adapter in it is replaced after all files are written; other files stay.
        adapter: name of the adapter.
        component: name of the transformer in the pipeline; not for several.
        dtype: dtype of the saved weights; None: the model's dtypes.
    Raises:
        TypeError: `transformer` is not a diffusers model.
        ValueError: a model has no adapter with this name.
    Ranks: the whole world.
    """
    from diffusers.loaders.lora_base import LoraBaseMixin
    from peft import get_peft_model_state_dict

    state, metadata = dict[str, Tensor](), dict[str, Any]()
    for name, module in (transformer if isinstance(transformer, Mapping) else {component: transformer}).items():
        model: Any = diffusers_model_of(module)
        adapters = getattr(model, "peft_config", None) or {}
        if adapter not in adapters:
            names = ", ".join(adapters) or "none"
            raise ValueError(f"adapter={adapter!r} is not valid: {type(model).__name__} has the adapters: {names}")
        layers = get_peft_model_state_dict(model, state_dict=get_model_state_dict(model), adapter_name=adapter)
        # the adapter only: the base stays sharded
        state |= {f"{name}.{layer}": x for layer, x in gather_on_first_rank(layers).items()}
        metadata |= {f"{name}.{key}": x for key, x in adapters[adapter].to_dict().items()}

    def write() -> None:
        with atomic_folder(Path(folder)) as scratch:
            LoraBaseMixin.write_lora_layers(
                state_dict={name: x.to(dtype or x.dtype).contiguous() for name, x in state.items()},
                save_directory=str(scratch),
                is_main_process=True,
                weight_name=LORA_FILE,
                save_function=None,
                safe_serialization=True,
                lora_adapter_metadata=metadata,
            )

    on_rank_zero(write)


def diffusers_model_of(module: nn.Module) -> nn.Module:
    """Return the diffusers model inside wrappers of Fabric, DDP and `torch.compile`. Raises: TypeError: none found."""
    from diffusers import ModelMixin

    model: Any = module
    while not isinstance(model, ModelMixin):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            raise TypeError(f"{type(module).__name__} is not a diffusers model: pass the transformer itself")
        model = inner
    return model  # type: ignore[no-any-return]


def on_rank_zero(write: Callable[[], object]) -> None:
    """Call `write` on rank 0 and wait for it on every rank. Raises: ExportError, on every rank: it failed."""
    failure: list[str | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            write()
        except Exception as error:
            if not dist.is_initialized() and not isinstance(error, _DISK_ERRORS):
                raise
            failure = [text_of(error)]
    if dist.is_initialized():
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise ExportError(f"the export could not be written: {failure[0]}")


def _full_state(model: nn.Module, *, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Gather all weights on the CPU of rank 0; other ranks get an empty dict. Call it on every rank."""
    state: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return {name: x.to(dtype) if dtype is not None and x.is_floating_point() else x for name, x in state.items()}
