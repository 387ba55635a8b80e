"""Writes and reads checkpoints: all or nothing, tensors as safetensors, the rest as JSON."""

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_cp.checkpoint.flatten import flatten_state, independent, unflatten_state
from lightning_cp.checkpoint.manifest import FileEntry, Manifest, read_manifest

_TREES = "trees"


@dataclass(frozen=True)
class Checkpoint:
    """What was saved: the step, states by name, and plain facts."""

    step: int
    states: dict[str, Any]
    facts: dict[str, Any]


def save_checkpoint(
    parent: Path,
    *,
    step: int,
    states: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Writes `parent/step_<n>`; call it on one rank only.

    All is written to a hidden folder beside it and flushed to disk; then that folder is renamed. Whoever is cut short
    leaves the older checkpoints as they were.

    Args:
        parent: the run's folder of checkpoints.
        step: of training.
        states: nested states by name, one safetensors file each: module, optimizer, averages.
        facts: plain values.
        keep: the newest so many are kept; None keeps all.
    Returns: the checkpoint's folder.
    """
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f"step_{step:08d}"
    scratch = parent / f".partial_{step:08d}_{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    files, trees = {}, {}
    for name, state in states.items():
        tensors, trees[name] = flatten_state(state)
        path = scratch / f"{name}.safetensors"
        save_file(independent(tensors), path)
        _flush(path)
        files[path.name] = FileEntry.of(path)
    Manifest(step, time.time(), files, {**(facts or {}), _TREES: trees}).write(scratch)
    _flush(scratch / "manifest.json")
    replaced = parent / f".replaced_{step:08d}_{os.getpid()}"
    if folder.exists():
        folder.rename(replaced)
    scratch.rename(folder)
    _flush(parent)
    shutil.rmtree(replaced, ignore_errors=True)
    if keep is not None:
        for old in sorted(parent.glob("step_*"))[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    return folder


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads what `save_checkpoint` wrote, onto the CPU.

    Raises: CheckpointError: it is missing, cut short or changed.
    """
    manifest = read_manifest(folder)
    facts = dict(manifest.facts)
    trees = facts.pop(_TREES)
    states: dict[str, Any] = {}
    for name, tree in trees.items():
        tensors: dict[str, Tensor] = load_file(folder / f"{name}.safetensors")
        states[name] = unflatten_state(tensors, tree)
    return Checkpoint(manifest.step, states, facts)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
