"""Full checkpoints: one rank writes all tensors as safetensors, one file per state, and other values as JSON."""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_cp.checkpoint.check import TREES
from lightning_cp.checkpoint.flatten import contiguous_copies, flatten_state, unflatten_state
from lightning_cp.checkpoint.folder import EARLIER_KEPT, checkpoint_path, drop_scratch, open_scratch, seal
from lightning_cp.checkpoint.manifest import (
    CheckpointError,
    FileEntry,
    Manifest,
    check_tree,
    parse_manifest,
    read_manifest,
)
from lightning_cp.files import writing


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a checkpoint: the step, states by name, and plain facts."""

    step: int
    states: Mapping[str, Any]
    facts: Mapping[str, Any]


def save_checkpoint(parent: Path, checkpoint: Checkpoint, *, keep: int | None = None) -> Path:
    """Write the checkpoint `parent/step_<n>`. Call it on one rank only.

    Files are written to a hidden folder in `parent` and flushed to disk; then the folder is renamed. An interrupted
    save leaves older checkpoints unchanged.

    Args:
        parent: the run's folder of checkpoints.
        checkpoint: nested states, one safetensors file each (model, optimizer, average), and plain facts.
        keep: number of newest checkpoints to keep; None: all.
    Returns: the checkpoint's folder.
    """
    return _write(parent, checkpoint, *_copy_to_cpu(checkpoint), keep=keep)


def save_checkpoint_in_background(
    parent: Path, checkpoint: Checkpoint, worker: ThreadPoolExecutor, *, keep: int | None = None
) -> "Future[Path]":
    """Copy the tensors and return; a thread of `worker` writes them as `save_checkpoint` does."""
    return worker.submit(_write, parent, checkpoint, *_copy_to_cpu(checkpoint), keep=keep)


def load_checkpoint(folder: Path, *, verify: bool = True) -> Checkpoint:
    """Read a checkpoint of `save_checkpoint` onto the CPU.

    Args: verify: False if `find_checkpoint` has just verified the CRC-32 of its files.
    Raises: CheckpointError: it is missing, truncated or changed.
    """
    manifest = read_manifest(folder) if verify else parse_manifest(folder)
    if manifest.has_shards:
        raise CheckpointError(f"{folder} is a distributed checkpoint (one file per rank): load it with load_shards")
    states = {}
    for name, tree in manifest.facts[TREES].items():
        try:
            tensors = load_file(folder / f"{name}.safetensors")
        except Exception as error:  # a changed header can raise anything
            raise CheckpointError(f"{folder} is damaged: {name}.safetensors cannot be read: {error}") from error
        check_tree(tensors.keys(), tree, folder)
        states[name] = unflatten_state(tensors, tree)
    return Checkpoint(manifest.step, states, manifest.plain_facts)


def _copy_to_cpu(checkpoint: Checkpoint) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Copy the tensors to the CPU, by state. Returns: the copies, and the tree of each state."""
    flat = {name: flatten_state(state) for name, state in checkpoint.states.items()}
    copies = {name: contiguous_copies(tensors) for name, (tensors, _) in flat.items()}
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
            with writing(path, EARLIER_KEPT):
                save_file(state, path)
            files[path.name] = FileEntry.of(path)
        manifest = Manifest(checkpoint.step, time.time(), files, {**checkpoint.facts, TREES: trees})
        with writing(checkpoint_path(parent, checkpoint.step), EARLIER_KEPT):
            return seal(parent, manifest, keep=keep)
    finally:
        drop_scratch(parent, checkpoint.step)
