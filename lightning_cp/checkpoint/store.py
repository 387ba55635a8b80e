"""Checkpoints that are whole: one rank writes all tensors as safetensors, a file a state, and the rest as JSON."""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_cp.checkpoint.check import TREES
from lightning_cp.checkpoint.flatten import flatten_state, independent, unflatten_state
from lightning_cp.checkpoint.folder import drop_scratch, open_scratch, seal
from lightning_cp.checkpoint.manifest import CheckpointError, FileEntry, Manifest, check_tree, read_manifest


@dataclass(frozen=True)
class Checkpoint:
    """What was saved: the step, states by name, and plain facts."""

    step: int
    states: Mapping[str, Any]
    facts: Mapping[str, Any]


def save_checkpoint(parent: Path, checkpoint: Checkpoint, *, keep: int | None = None) -> Path:
    """Writes `parent/step_<n>`; call it on one rank only.

    All is written to a hidden folder beside it and flushed to disk; then that folder is renamed. Whoever is cut short
    leaves the older checkpoints as they were.

    Args:
        parent: the run's folder of checkpoints.
        checkpoint: nested states, one safetensors file each (model, optimizer, average), and plain facts.
        keep: the newest so many are kept; None keeps all.
    Returns: the checkpoint's folder.
    """
    return _write(parent, checkpoint, *_staged(checkpoint), keep=keep)


def save_checkpoint_later(
    parent: Path, checkpoint: Checkpoint, worker: ThreadPoolExecutor, *, keep: int | None = None
) -> "Future[Path]":
    """As `save_checkpoint`, but when it returns only copies are made; a worker's thread writes them."""
    return worker.submit(_write, parent, checkpoint, *_staged(checkpoint), keep=keep)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads what `save_checkpoint` wrote, onto the CPU.

    Raises: CheckpointError: it is missing, cut short or changed.
    """
    manifest = read_manifest(folder)
    if manifest.has_shards:
        raise CheckpointError(f"{folder} holds a file of each rank: load it with load_shards")
    states = {}
    for name, tree in manifest.facts[TREES].items():
        try:
            tensors = load_file(folder / f"{name}.safetensors")
        except Exception as error:  # whatever a changed header leads to
            raise CheckpointError(f"{folder} is damaged: {name}.safetensors cannot be read: {error}") from error
        check_tree(tensors.keys(), tree, folder)
        states[name] = unflatten_state(tensors, tree)
    return Checkpoint(manifest.step, states, manifest.plain_facts)


def _staged(checkpoint: Checkpoint) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Copies of the tensors by state, and the trees that they hang on."""
    flat = {name: flatten_state(state) for name, state in checkpoint.states.items()}
    copies = {name: independent(tensors) for name, (tensors, _) in flat.items()}
    return copies, {name: tree for name, (_, tree) in flat.items()}


def _write(
    parent: Path,
    checkpoint: Checkpoint,
    tensors: dict[str, dict[str, Tensor]],
    trees: dict[str, Any],
    *,
    keep: int | None,
) -> Path:
    try:
        scratch = open_scratch(parent, checkpoint.step)
        files = {}
        for name, state in tensors.items():
            path = scratch / f"{name}.safetensors"
            try:
                save_file(state, path)
            except SafetensorError as error:
                raise OSError(f"{path} could not be written: {error}") from error
            files[path.name] = FileEntry.of(path)
        manifest = Manifest(checkpoint.step, time.time(), files, {**checkpoint.facts, TREES: trees})
        return seal(parent, manifest, keep=keep)
    finally:
        drop_scratch(parent, checkpoint.step)
