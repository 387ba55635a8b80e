"""Copy weights from safetensors files into a model's weights, whole or sharded, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cp.compat.distributed_names import compute_local_shape_and_global_offset
from lightning_cp.finetune.quantize import QuantizedLinear, QuantizedRows
from lightning_cp.finetune.weight_files import find_weights, local_pipeline


@dataclass(frozen=True)
class WeightStream:
    """Loader of a model's weights, see `stream_weights`. Args: folder: the component's folder."""

    folder: str

    def __call__(self, module: nn.Module) -> None:
        """Load the weights of `module`."""
        _stream(module, Path(self.folder))


def stream_weights(module: nn.Module, source: str | Path, component: str = "transformer") -> None:
    """Copy a pretrained transformer's weights into a model, in the model's dtypes.

    The files are memory-mapped, and each rank copies its own slice of each tensor: at most one slice more than the
    model is in memory, and nothing is sent. Adapters keep their weights. The strategies call this for models of
    `meta_transformer`; call it to load the weights again.

    Args:
        module: the transformer, with whole or sharded (DTensor) weights that have storage.
        source, component: see `load_transformer`.
    Raises: ValueError: a file is missing or damaged, or names or shapes differ from the model's.
    """
    _stream(module, local_pipeline(source, component, setting="model.pretrained") / component)


@torch.no_grad()
def _stream(module: nn.Module, folder: Path) -> None:
    from safetensors import safe_open

    files = find_weights(folder)
    targets = dict(_base_weights(module))
    freed = {name for name, x in targets.items() if not x.numel() and files.shapes.get(name, (0,)) != tuple(x.shape)}
    aliases = {name: x for name, x in targets.items() if name not in files.shapes and name not in freed}
    loaded = {id(targets[name]) for name in files.shapes if name in targets}
    missing = [name for name, x in aliases.items() if id(x) not in loaded]  # tied weights are saved under one name
    ignored = [re.compile(x) for x in getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()]
    left = [name for name in files.shapes if name not in targets and not any(x.search(name) for x in ignored)]
    targets = {name: x for name, x in targets.items() if name not in freed}  # of blocks that other ranks hold
    for names, problem in ((missing, "are missing in the files"), (left, "are not in the model")):
        if names:
            raise ValueError(f"{folder}: {names[0]} and {len(names) - 1} more weights {problem}")
    for name, target in targets.items():
        if name in files.shapes and files.shapes[name] != tuple(target.shape):
            raise ValueError(
                f"{folder}: {name} has shape {list(files.shapes[name])} in the files, and {list(target.shape)} in "
                "the model"
            )
    for path, names in files.by_file.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                if name in targets:
                    _copy(file, name, targets[name])


def _copy(file: Any, name: str, target: Tensor | QuantizedRows) -> None:
    """Copy a tensor, or this rank's slice of it, from an open file; or quantise it."""
    stored = target.layer.packed if isinstance(target, QuantizedRows) else target
    if isinstance(stored, DTensor):
        shape, offset = compute_local_shape_and_global_offset(stored.shape, stored.device_mesh, stored.placements)
        if 0 in shape:
            return
        slices = [slice(start, start + length) for start, length in zip(offset, shape, strict=True)]
        where = slices[:1] if isinstance(target, QuantizedRows) else slices
        local, values = stored.to_local(), file.get_slice(name)[tuple(where)]
    else:
        local, values = stored, file.get_tensor(name)
    if isinstance(target, QuantizedRows):
        target.fill(local, values)
    else:
        local.copy_(values)


def _base_weights(module: nn.Module) -> Iterator[tuple[str, Tensor | QuantizedRows]]:
    """Yield the weights that a file of the model without adapters holds, by their names there.

    An adapter moves a layer's weights into a child `base_layer` of its own layer.
    """
    quantized = {f"{name}.packed": x for name, x in module.named_modules() if isinstance(x, QuantizedLinear)}
    adapted = [f"{name}." for name, inner in module.named_modules() if _is_adapter_layer(inner)]
    for key, tensor in module.state_dict(keep_vars=True).items():
        x = QuantizedRows(quantized[key]) if key in quantized else tensor
        name = f"{key.removesuffix('packed')}weight" if key in quantized else key
        inside = next((prefix for prefix in adapted if name.startswith(prefix)), None)
        if inside is None:
            yield name, x
        elif name.startswith(f"{inside}base_layer."):
            yield inside + name.removeprefix(f"{inside}base_layer."), x


def _is_adapter_layer(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "adapter_layer_names")
