"""Save the transformers of `tests.models` as pipeline folders, in the format of `save_pretrained`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_cp.training.ema import full_tensor
from tests.models import TINY

PIPELINES = {"wan": "WanPipeline", "flux": "FluxPipeline", "sd3": "StableDiffusion3Pipeline"}


def saved(folder: Path, name: str, *, components: tuple[str, ...] = ("transformer",), shard: str = "60KB") -> Path:
    """Save tiny transformers in float32, in several files. Returns: `folder`."""
    index: dict[str, Any] = {"_class_name": PIPELINES[name], "_diffusers_version": "0.42.1", "vae": [None, None]}
    for component in components:
        model: Any = TINY[name].build().float()
        model.save_pretrained(folder / component, max_shard_size=shard)
        index[component] = ["diffusers", type(model).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def inputs(name: str, dtype: Any = None) -> dict[str, Any]:
    """Inputs of a tiny transformer, in float32 or `dtype`."""
    found = {k: x.float() if x.is_floating_point() else x for k, x in TINY[name].arguments().items()}
    kept = ("timestep", "img_ids", "txt_ids")
    return found if dtype is None else {k: x if k in kept else x.to(dtype) for k, x in found.items()}


def lora_state(transformer: nn.Module) -> dict[str, Tensor]:
    """Matrices of the adapter in full, by diffusers' names without the component. Ranks: all with a shard."""
    kinds, norms = r"\.(lora_A|lora_B|lora_magnitude_vector|lokr_\w+)\.default\b", "vector.default.weight"
    return {
        re.sub(r"\.default\b", "", name.replace(norms, "vector")): full_tensor(x.detach()).to("cpu", copy=True)
        for name, x in transformer.named_parameters()
        if re.search(kinds, name)
    }
