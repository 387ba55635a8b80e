"""Checkpoints of a run: every rank writes its shards with torch DCP, as safetensors and without pickle."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from lightning_cp.checkpoint.check import TREE
from lightning_cp.checkpoint.flatten import flatten_state, unflatten_state
from lightning_cp.checkpoint.folder import (
    EARLIER_KEPT,
    checkpoint_path,
    drop_scratch,
    flush,
    open_scratch,
    scratch_path,
    seal,
)
from lightning_cp.checkpoint.manifest import (
    CheckpointError,
    FileEntry,
    Manifest,
    check_same_tensors,
    check_tree,
    parse_manifest,
    read_manifest,
)

_FILE_BYTES = 1 << 30  # of one file of a rank: torch has it in memory three times while it is written


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a checkpoint: the step, states by name, and plain facts."""

    step: int
    states: Mapping[str, Any]
    facts: Mapping[str, Any]


def save_checkpoint(parent: Path, checkpoint: Checkpoint, *, keep: int | None = None) -> Path:
    """Write the checkpoint `parent/step_<n>`. Call it on every rank; tensors may be DTensors.

    Files are written to a hidden folder in `parent` and flushed to disk; then the folder is renamed. An interrupted
    save leaves older checkpoints unchanged.

    Args:
        parent: the run's folder of checkpoints; all ranks see it.
        checkpoint: nested states (model, optimizer, average), and plain facts.
        keep: number of newest checkpoints to keep; None: all.
    Returns: the checkpoint's folder.
    Raises: OSError: a rank could not write its files.
    """
    tensors, writer = _plan(parent, checkpoint, keep)
    with _writing(parent, checkpoint.step):
        save(tensors, storage_writer=writer, planner=_Copies(), no_dist=not dist.is_initialized())
    return checkpoint_path(parent, checkpoint.step)


def save_checkpoint_in_background(
    parent: Path, checkpoint: Checkpoint, group: dist.ProcessGroup | None, *, keep: int | None = None
) -> Callable[[], None]:
    """Copy the tensors and return; a background thread writes them as `save_checkpoint` does.

    Args: group: gloo group of all ranks, used for nothing else; None in a single process.
    Returns: a function that waits for the end of the write and raises its error.
    """
    tensors, writer = _plan(parent, checkpoint, keep)
    pending = async_save(tensors, storage_writer=writer, planner=_Copies(), process_group=group, no_dist=group is None)
    assert isinstance(pending, Future), "torch's default stager copies at once"

    def wait() -> None:
        with _writing(parent, checkpoint.step):
            pending.result()

    return wait


def load_checkpoint(folder: Path, states: Mapping[str, Any] | None = None, *, verify: bool = True) -> Checkpoint:
    """Read a checkpoint of `save_checkpoint` on any number of ranks. Call it on every rank; each reads its own shards.

    Args:
        states: nested states of this run; their tensors are filled in place. A state that is in the checkpoint but not
            here is read in full, onto the CPU.
        verify: False if `find_checkpoint` has just verified the CRC-32 of its files.
    Raises: CheckpointError: it is missing, truncated or changed, or holds other tensors.
    """
    manifest = read_manifest(folder) if verify else parse_manifest(folder)
    states = states or {}
    tensors, _ = flatten_state(dict(states))
    reader, saved_shapes = HuggingFaceStorageReader(str(folder)), dict[str, tuple[int, ...]]()
    metadata, tree = _read_metadata(reader, manifest, folder), manifest.facts[TREE]
    check_tree(metadata.keys(), tree, folder)
    for name, x in metadata.items():
        if name.partition(".")[0] not in states:
            tensors[name] = torch.empty(x.size, dtype=x.properties.dtype)
        saved_shapes[name] = tuple(x.size)
    check_same_tensors({name: tuple(x.shape) for name, x in tensors.items()}, saved_shapes, folder)
    _ignore_warning_of_one_process()
    with reraise_as(CheckpointError, f"{folder} cannot be loaded"):
        load(cast("dict[str, Any]", tensors), storage_reader=reader, no_dist=not dist.is_initialized())
    return Checkpoint(manifest.step, unflatten_state(tensors, tree), manifest.plain_facts)


def _read_metadata(
    reader: HuggingFaceStorageReader, manifest: Manifest, folder: Path
) -> dict[str, TensorStorageMetadata]:
    """Read tensor metadata from the files' headers. Raises: CheckpointError: the files cannot hold these tensors."""
    try:
        metadata = reader.read_metadata().state_dict_metadata
    except Exception as error:  # a changed header can raise anything
        raise CheckpointError(f"{folder} is damaged: its files cannot be read: {error!r}"[:500]) from error
    tensors = {name: x for name, x in metadata.items() if isinstance(x, TensorStorageMetadata)}
    needed = sum(math.prod(x.size) * x.properties.dtype.itemsize for x in tensors.values())
    available = sum(entry.size_bytes for entry in manifest.files.values())
    if any(n < 0 for x in tensors.values() for n in x.size) or needed > available or tensors.keys() != metadata.keys():
        raise CheckpointError(f"{folder} is damaged: its tensors need {needed} bytes, but its files have {available}")
    return tensors


def _ignore_warning_of_one_process() -> None:
    """Ignore DCP's warning that there is no process group, also in its thread."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


@contextmanager
def reraise_as(kind: type[Exception], text: str) -> Iterator[None]:
    """Reraise DCP's CheckpointException as `kind`: it is a BaseException, which `except Exception` does not catch."""
    try:
        yield
    except CheckpointException as error:
        messages = "; ".join(f"rank {rank}: {failure!r}" for rank, (failure, _) in sorted(error.failures.items()))
        raise kind(f"{text}: {messages}") from error


@contextmanager
def _writing(parent: Path, step: int) -> Iterator[None]:
    """Raise OSError if a checkpoint is not written, and leave no hidden folder behind."""
    try:
        with reraise_as(OSError, f"{checkpoint_path(parent, step)} could not be written ({EARLIER_KEPT})"):
            yield
    finally:
        drop_scratch(parent, step)


def _plan(parent: Path, checkpoint: Checkpoint, keep: int | None) -> tuple[dict[str, Any], "_Writer"]:
    _ignore_warning_of_one_process()
    tensors, tree = flatten_state(dict(checkpoint.states))
    facts = {**checkpoint.facts, TREE: tree}
    return dict(tensors), _Writer(parent, checkpoint.step, facts, keep=keep, files=_files(tensors))


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Number the file of each tensor, from 1, so that no file of a rank has much more than `_FILE_BYTES`."""
    ranks, total = dist.get_world_size() if dist.is_initialized() else 1, 0
    files = {}
    for name, x in tensors.items():
        files[name] = 1 + total // (_FILE_BYTES * ranks)
        total += x.numel() * x.element_size()
    return files


class _Copies(DefaultSavePlanner):
    """Copy tensors to contiguous CPU memory without sharing, as safetensors requires."""

    @override
    def transform_object(self, write_item: WriteItem, object: Any) -> Tensor:
        x: Tensor = super().transform_object(write_item, object)
        return x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class _Written:
    """Files of one rank, sent to rank 0."""

    files: dict[str, FileEntry]


class _Writer(HuggingFaceStorageWriter):
    """Write to the scratch folder; rank 0 renames it after all ranks have written."""

    def __init__(
        self, parent: Path, step: int, facts: dict[str, Any], *, keep: int | None, files: dict[str, int]
    ) -> None:
        super().__init__(str(scratch_path(parent, step)), files, save_distributed=True)
        self._parent, self._step, self._facts, self._keep = parent, step, facts, keep

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # rank 0 makes the folder

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        open_scratch(self._parent, self._step)
        return super().prepare_global_plan(plans)

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        scratch = Path(self.path)
        names = {result.storage_data.relative_path for result in results}
        for name in names:
            flush(scratch / name)
        done: torch.futures.Future[list[Any]] = torch.futures.Future()
        done.set_result([_Written({name: FileEntry.of(scratch / name) for name in names})])
        return done

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        by_rank = cast("list[list[_Written]]", results)
        files = {
            name: entry
            for written_by_rank in by_rank
            for written in written_by_rank
            for name, entry in written.files.items()
        }
        seal(self._parent, Manifest(self._step, time.time(), files, self._facts), keep=self._keep)
