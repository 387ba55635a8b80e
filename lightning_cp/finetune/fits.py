"""Check that a cache fits the pipeline that it trains: sizes, and facts of the VAE and the scheduler."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_cp.errors import FamilyError
from lightning_cp.files import read_json
from lightning_cp.finetune.families import Family
from lightning_cp.finetune.families.schedule import diffusion_facts, shift_facts
from lightning_cp.pipeline_folder import index_file, read_index

_USUAL_WIDTH = 3072  # FLUX.1
_OF_VAE = {"scaling_factor", "shift_factor", "latents_mean", "latents_std"}  # facts with the VAE's names
_GUIDANCE = {"guidance_embeds": "transformer", "control_guidance_embeds": "controlnet"}  # facts of these models
_OF_SCHEDULER = {  # fact -> the scheduler that states it, and how it is read
    "shift": ("scheduler", shift_facts),
    "schedule": ("scheduler", diffusion_facts),
    "sound_shift": ("audio_scheduler", shift_facts),
}


def width_of(config: Mapping[str, Any]) -> int:
    """Return the width of a transformer's blocks, from its config: head dim times heads, or "dim"."""
    heads = int(config.get("num_attention_heads", 0)) * int(config.get("attention_head_dim", 0))
    return heads or int(config.get("dim", 0)) or _USUAL_WIDTH


def check_fits(
    source: str, component: str, family: Family, config: Mapping[str, Any], sample: Mapping[str, Tensor]
) -> None:
    """Compare a transformer's config with an encoded sample.

    Args:
        source: the pipeline, for errors.
        component: name of the transformer.
        family: its family, see `Family.widths`.
        config: its config.
        sample: stored tensors of a sample, "latents" as the VAE returns them: [channels, ...].
    Raises: FamilyError: the VAE or the text encoder belongs to another transformer.
    """
    if not family.widths:
        return
    latents, text, *sound = family.widths
    if not config.get("use_prompt_embeddings", True):  # LTX-2.3: no layer projects text to the width of the blocks
        text = "cross_attention_dim"
    sizes = {
        latents: (sample["latents"].shape[0] * family.packed, "VAE", "latent channels"),
        text: (sample["prompt_embeds"].shape[-1], "text encoder", "text embeddings of width"),
    }
    for key in sound:
        channels, _, bins = sample["sound"].shape
        sizes[key] = (bins * (channels if family.packs_sound else 1), "audio VAE", "latents of sound of width")
    for key, (size, part, what) in sizes.items():
        if config.get(key, size) != size:
            raise FamilyError(
                f"the parts of model.pretrained={source} do not fit: its {part} makes {what} {size}, but the "
                f"{component} has {key}={config[key]}. One of them is from another pipeline: download or copy it again"
            )


def check_cache(
    folder: Path,
    family: Family,
    sample: Mapping[str, Tensor],
    source: str,
    pipeline: Mapping[str, tuple[str, Any]],
    replaced: Collection[str] = (),
) -> None:
    """Compare the facts and the dtypes of a cache with the pipeline that it trains.

    Args:
        folder: the cache, for errors.
        family: the family with the facts that the cache has stored.
        sample: stored tensors of a sample.
        source: the pipeline, for errors.
        pipeline: the facts of the pipeline, see `pipeline_facts`.
        replaced: facts that settings of the objective replace, so that they may differ.
    Raises: FamilyError: names the fact, its value in the cache, and the pipeline's.
    """
    again = "encode the data with this pipeline (lightning-cp precompute, another output)"
    for name, (part, value) in pipeline.items():
        stored = family.facts.get(name, value)
        if name not in replaced and not _are_equal(stored, value):
            remedy = f"set objective.shift, or {again}" if name == "shift" else again
            raise FamilyError(
                f"data.path={folder} has {name}={reprlib.repr(stored)}, but the {part} of model.pretrained={source} "
                f"has {name}={reprlib.repr(value)}: {remedy}"
            )
    for name in ("scaling_factor", "latents_std"):
        if not _are_positive(family.facts.get(name, 1.0)):
            raise FamilyError(f"data.path={folder} has {name}={family.facts[name]}, which must be positive: {again}")
    for name, x in sample.items():
        is_mask = name.endswith("mask")
        if (name.startswith("latents") or name in family.text.names) and not is_mask and not x.is_floating_point():
            raise FamilyError(f"data.path={folder} has {name} in {x.dtype}, which must be a float dtype: {again}")


def pipeline_facts(folder: Path, names: Collection[str]) -> dict[str, tuple[str, Any]]:
    """Read facts of a pipeline from its config files; a file that is not here states none.

    Args: folder: folder of the pipeline. names: names of the facts, see `Family.facts`.
    Returns: for each fact that is found, the component that states it, and its value.
    Raises: ValueError: a file is damaged. FamilyError: the scheduler is of an unknown class, or has no such schedule.
    """
    vae = _config(folder / "vae" / "config.json")
    facts = {name: ("VAE", vae[name]) for name in _OF_VAE & vae.keys()}
    index = read_index(folder) if index_file(folder) is not None else {}
    facts |= {name: ("configuration", index[name]) for name in {"boundary_ratio"} & index.keys()}
    for name, component in _GUIDANCE.items():
        config = _config(folder / component / "config.json")
        if "guidance_embeds" in config:
            facts[name] = (component, config["guidance_embeds"])
    for name, (component, read) in _OF_SCHEDULER.items():
        config = _config(folder / component / "scheduler_config.json")
        if name in names and config:
            facts[name] = (component, read(_scheduler(config)))
    return {name: fact for name, fact in facts.items() if name in names}


def _config(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _scheduler(config: dict[str, Any]) -> Any:
    import diffusers

    name = str(config.get("_class_name"))
    kind: Any = getattr(diffusers, name, None)
    if not hasattr(kind, "from_config") or not issubclass(kind, diffusers.SchedulerMixin):
        raise FamilyError(f"the scheduler of the pipeline has _class_name={name!r}, which is no scheduler of diffusers")
    return kind.from_config(config)


def _are_equal(one: Any, other: Any) -> bool:
    """Compare facts. Schedules computed on another machine differ by rounding (float32); files keep all digits."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-6)
    return bool(one == other)


def _are_positive(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return all(isinstance(x, (int, float)) and 0 < x < math.inf for x in values)
