"""Save the transformers of `tests.models` as pipeline folders, in the format of `save_pretrained`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
