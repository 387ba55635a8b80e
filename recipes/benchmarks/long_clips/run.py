"""Run bench=long_clips: check its settings, count, and write the results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_cp.planning.models import MediaSize
from lightning_cp.recipes.benchmarks.long_clips.activations import activation_rows
from lightning_cp.recipes.benchmarks.long_clips.curve import TRAININGS, clip_rows
from lightning_cp.recipes.benchmarks.long_clips.report import activations_table, clips_table, write

PARTS = ("activations", "clips")


def check_settings(config: DictConfig) -> str:
    """Check the settings of bench=long_clips. Returns: what is wrong; "" if nothing is."""
    for name, values, valid in (
        ("parts", config.parts, PARTS),
        ("long_clips.trainings", config.long_clips.trainings, TRAININGS),
    ):
        if not values or any(x not in valid for x in values):
            return f"{name}={list(values)} is not valid: must be some of {', '.join(valid)}"
    if not config.ranks or not all(
        isinstance(x, int) and (x in (1, 2, 4) or (x > 0 and x % 8 == 0)) for x in config.ranks
    ):
        return f"ranks={list(config.ranks)}: must be 1, 2, 4 or multiples of 8"
    reserved = config.long_clips.reserved_gb
    for memory in config.long_clips.memory_gb:
        if not isinstance(memory, (int, float)) or memory <= reserved:
            return f"long_clips.memory_gb={memory} must be a number above reserved_gb={reserved}"
    return ""


def run(config: DictConfig, folder: Path, report: Callable[[str], object] = print) -> None:
    """Count the activations and the longest clips, and write them to `folder`. The rows are reported as they come."""
    settings: Any = OmegaConf.to_container(config, resolve=True)
    activations, clips = [], []
    if "activations" in config.parts:
        given = settings["activations"]
        for row in activation_rows(
            given["config"], MediaSize(**given["size"]), lora_rank=given["lora_rank"], ranks=given["ranks"]
        ):
            activations.append(row)
            report(activations_table([row])[-1])
    if "clips" in config.parts:
        given = settings["long_clips"]
        for clip in clip_rows(given["memory_gb"], given["reserved_gb"], given["trainings"], settings["ranks"]):
            clips.append(clip)
            report(clips_table([clip])[-1])
    report(", ".join(str(path) for path in write(activations, clips, folder)))
