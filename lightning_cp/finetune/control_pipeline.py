"""Make a ControlNet from the first blocks of a pipeline's transformer, as a pipeline folder that can be trained."""

from __future__ import annotations

import inspect
import json
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_cp.files import read_json
from lightning_cp.finetune.family_table import CONTROLNET
from lightning_cp.finetune.weight_files import WeightFiles, find_weights, local_pipeline

_NEW: dict[str, tuple[str, str, dict[str, int]]] = {  # of a transformer: model, pipeline, and the trainers' sizes
    "FluxTransformer2DModel": (
        *("FluxControlNetModel", "FluxControlNetPipeline"),
        {"num_layers": 4, "num_single_layers": 4},  # diffusers' examples/controlnet/train_controlnet_flux.py
    ),
    "QwenImageTransformer2DModel": (
        *("QwenImageControlNetModel", "QwenImageControlNetPipeline"),
        {"num_layers": 5},  # the default of its `from_transformer`
    ),
}


def new_controlnet(pretrained: str | Path, folder: str | Path, **sizes: int) -> Path:
    """Write a pipeline with a ControlNet that is made from the transformer of another pipeline, to train it.

    The ControlNet begins with the weights of the transformer's first blocks and of its embedders, and with zeros where
    its outputs enter the transformer: before training it changes nothing. Only these weights are read. The other
    components of the folder are links to those of `pretrained`.

    Args:
        pretrained: folder of a pipeline with the transformer of FLUX.1 or QwenImage.
        folder: folder to write; it must not exist.
        sizes: numbers of blocks: `num_layers`, and `num_single_layers` for FLUX.1; default: 4 and 4, 5 for QwenImage.
    Returns: `folder`.
    Raises: ValueError: no such pipeline, another transformer, fewer blocks than asked for, or the folder exists.
    """
    import diffusers

    target = Path(folder)
    if target.exists():
        raise ValueError(f"folder={target} exists: choose another one, or remove it")
    if not Path(pretrained).is_dir():
        raise ValueError(f"pretrained={pretrained} must be a pipeline's folder: download it first")
    source = local_pipeline(pretrained, "transformer", setting="pretrained")
    index = read_json(source / "model_index.json")
    transformer = (index.get("transformer") or [None, None])[-1]
    if transformer not in _NEW:
        raise ValueError(
            f"pretrained={source} has the transformer {transformer}, but must have one of {', '.join(_NEW)}"
        )
    kind, pipeline, defaults = _NEW[transformer]
    unknown = sizes.keys() - defaults
    if unknown:
        raise ValueError(f"{min(unknown)} is no size of {kind}: set {' or '.join(defaults)}")
    known = inspect.signature(getattr(diffusers, kind).__init__).parameters
    config = {name: x for name, x in read_json(source / "transformer" / "config.json").items() if name in known}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`FluxPosEmbed` is deprecated", FutureWarning)
        model: Any = getattr(diffusers, kind).from_config({**config, **defaults, **sizes})
    _load_shared(model, find_weights(source / "transformer"))
    target.mkdir(parents=True)
    model.save_pretrained(target / CONTROLNET, safe_serialization=True)
    for name in index:
        if (source / name).is_dir():
            (target / name).symlink_to((source / name).resolve(), target_is_directory=True)
    index = {**index, "_class_name": pipeline, CONTROLNET: ["diffusers", kind]}
    (target / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return target


def _load_shared(model: nn.Module, files: WeightFiles) -> None:
    """Load all weights that a transformer's files have, in their dtype. Raises: ValueError: it has too few blocks."""
    from safetensors import safe_open

    own = model.state_dict()
    missing = [name for name in own if name not in files.files and not name.startswith(f"{CONTROLNET}_")]
    if missing:
        raise ValueError(f"{files.folder} has no {missing[0]}: make the ControlNet with fewer blocks")
    shared: dict[str, Tensor] = {}
    for path, names in files.by_file.items():
        with safe_open(path, framework="pt") as file:
            shared |= {name: file.get_tensor(name) for name in names if name in own}
    model.to(next(iter(shared.values())).dtype).load_state_dict(shared, strict=False)
