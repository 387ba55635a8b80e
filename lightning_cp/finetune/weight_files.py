"""Find and check the safetensors files of a model, and copy them into its weights, whole or sharded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cp.compat.distributed_names import compute_local_shape_and_global_offset
from lightning_cp.files import check_regular, read_json, why_not_regular
from lightning_cp.finetune.quantize import QuantizedLinear, QuantizedRows
from lightning_cp.pipeline_folder import PIPELINE_INDEX, find_pipeline, index_file

SINGLE_FILE = "diffusion_pytorch_model.safetensors"
INDEX_FILE = "diffusion_pytorch_model.safetensors.index.json"


@dataclass(frozen=True)
class WeightFiles:
    """Safetensors files of one model.

    Attributes:
        folder: folder that holds them.
        files: file of each tensor, by the tensor's name.
        shapes: shape of each tensor, by name.
    """

    folder: Path
    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def by_file(self) -> dict[Path, list[str]]:
        """Names of the tensors in each file."""
        names_by_file: dict[Path, list[str]] = {}
        for name, path in self.files.items():
            names_by_file.setdefault(path, []).append(name)
        return names_by_file


def local_pipeline(source: str | Path, component: str, *, setting: str) -> Path:
    """Return the folder of a pipeline. From the Hub, only the safetensors files of one component are downloaded.

    Args:
        source: folder, or id on the Hub.
        component: name of the component.
        setting: name of the setting that holds `source`, for error messages.
    Raises: ValueError: it is no pipeline, or cannot be downloaded.
    """
    wanted = ("config.json", SINGLE_FILE, INDEX_FILE, "diffusion_pytorch_model-*.safetensors")
    folder = find_pipeline(source, *(f"{component}/{name}" for name in wanted), setting=setting)
    if index_file(folder) is None:
        is_model = (folder / "config.json").is_file()
        hint = "it holds one model, so use its parent folder" if is_model else "use a folder saved by save_pretrained"
        raise ValueError(f"{setting}={source} is not a pipeline, because it has no {PIPELINE_INDEX}: {hint}")
    return folder


def find_weights(folder: Path) -> WeightFiles:
    """Find a model's safetensors files, and read their headers.

    Raises: ValueError: a file is missing or damaged, or there are only pickle files.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise ValueError(f"{index} is damaged: it has no valid weight_map. Download or copy the pipeline again")
        files = {name: folder / Path(file).name for name, file in names.items()}
    elif (folder / SINGLE_FILE).is_file():
        files = dict.fromkeys(_header(folder / SINGLE_FILE), folder / SINGLE_FILE)
    else:
        raise ValueError(_without_weights(folder))
    headers: dict[Path, dict[str, tuple[int, ...]]] = {}
    for path in dict.fromkeys(files.values()):
        if not path.is_file():
            raise ValueError(f"{path} is missing, but {INDEX_FILE} lists it. Download or copy the pipeline again")
        headers[path] = _header(path)
    for name, path in files.items():
        if name not in headers[path]:
            raise ValueError(f"{path} has no tensor {name}, but {INDEX_FILE} lists it. Download the pipeline again")
    unlisted = {name: path for path, header in headers.items() for name in header if name not in files}
    files = {**files, **unlisted}  # the caller decides about names that the model does not have
    return WeightFiles(folder, files, {name: headers[path][name] for name, path in files.items()})


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or incomplete ({error}). Download or copy it again") from None


def _without_weights(folder: Path) -> str:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} has its weights in pickle files only ({pickles[0]}), which can run code: convert them with "
            "save_pretrained(..., safe_serialization=True), or use a copy with safetensors files"
        )
    variants = sorted(path.name for path in folder.glob("*.safetensors"))
    variant_files = f", only {', '.join(variants[:3])}" if variants else ""
    for file in (folder / SINGLE_FILE, folder / INDEX_FILE):
        if file.exists():
            return f"{file} {why_not_regular(file)}, but must be a file"
    return f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{variant_files}"


def check_names(
    where: str,
    shapes: Mapping[str, tuple[int, ...]],
    files: WeightFiles,
    model: Any,
    *,
    missing: Sequence[str] | None = None,
) -> None:
    """Compare names and shapes of a model's weights with its files'. Raises: ValueError: they differ.

    Args:
        where: begins the error.
        shapes: of the model's weights, by their names in the files.
        missing: names that the files lack; None: all names of `shapes` that are not in them.
    """
    ignored = [re.compile(x) for x in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    missing = [name for name in shapes if name not in files.shapes] if missing is None else missing
    left = [name for name in files.shapes if name not in shapes and not any(x.search(name) for x in ignored)]
    other = [name for name, shape in shapes.items() if files.shapes.get(name, shape) != shape]
    if missing:
        raise ValueError(f"{where}: {missing[0]} and {len(missing) - 1} more weights are missing in the files")
    if left:
        raise ValueError(f"{where}: the files have {left[0]} and {len(left) - 1} more weights that the model lacks")
    if other:
        raise ValueError(
            f"{where}: {other[0]} has shape {list(files.shapes[other[0]])} in the files, and "
            f"{list(shapes[other[0]])} in the model"
        )


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
    shapes = {name: files.shapes[name] if name in freed else tuple(x.shape) for name, x in targets.items()}
    check_names(str(folder), shapes, files, module, missing=missing)
    targets = {name: x for name, x in targets.items() if name not in freed}  # of blocks that other ranks hold
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
