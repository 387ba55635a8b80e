"""Checkpoints of a run: every rank writes its shards with torch DCP, as safetensors and without pickle."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

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
    TREE,
    CheckpointError,
    FileEntry,
    Manifest,
    check_same_tensors,
    parse_manifest,
    read_manifest,
)

_FILE_BYTES = 1 << 30  # of one file of a rank: torch has it in memory three times while it is written
_PLAIN = (str, int, float, bool, type(None))


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
    for name, x in cast("dict[str, TensorStorageMetadata]", reader.read_metadata().state_dict_metadata).items():
        if name.partition(".")[0] not in states:
            tensors[name] = torch.empty(x.size, dtype=x.properties.dtype)
        saved_shapes[name] = tuple(x.size)
    check_same_tensors({name: tuple(x.shape) for name, x in tensors.items()}, saved_shapes, folder)
    _ignore_warning_of_one_process()
    with reraise_as(CheckpointError, f"{folder} cannot be loaded"):
        load(cast("dict[str, Any]", tensors), storage_reader=reader, no_dist=not dist.is_initialized())
    return Checkpoint(manifest.step, unflatten_state(tensors, manifest.facts[TREE]), manifest.plain_facts)


def _ignore_warning_of_one_process() -> None:
    """Ignore DCP's warning that there is no process group, also in its thread."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


@contextmanager
def reraise_as(kind: type[Exception], text: str, show: Callable[[BaseException], str] = repr) -> Iterator[None]:
    """Reraise DCP's CheckpointException as `kind`: it is a BaseException, which `except Exception` does not catch.

    Args: show: text of a rank's error.
    """
    try:
        yield
    except CheckpointException as error:
        messages = "; ".join(f"rank {rank}: {show(failure)}" for rank, (failure, _) in sorted(error.failures.items()))
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
        done.set_result([{name: FileEntry.of(scratch / name) for name in names}])  # sent to rank 0
        return done

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        by_rank = cast("list[list[dict[str, FileEntry]]]", results)
        files = {name: entry for (written,) in by_rank for name, entry in written.items()}
        seal(self._parent, Manifest(self._step, time.time(), files, self._facts), keep=self._keep)


def flatten_state(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Split nested dicts, lists, tuples, plain values and tensors into tensors by name and a JSON tree.

    Raises: TypeError: the state holds other objects. ValueError: two tensors would get the same name.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _flatten(state, "", tensors)


def unflatten_state(tensors: dict[str, Tensor], tree: Any) -> Any:
    """Rebuild the state that `flatten_state` split."""
    if not isinstance(tree, dict):
        return tree
    kind, value = next(iter(tree.items()))
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: unflatten_state(tensors, item) for key, item in value}
    items = [unflatten_state(tensors, item) for item in value]
    return tuple(items) if kind == "tuple" else items


def _flatten(state: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(state, Tensor):
        if name in tensors:  # for example {"a.b": x, "a": {"b": y}}
            raise ValueError(f"two tensors of the state would be saved as {name}: rename one of their keys")
        tensors[name] = state
        return {"tensor": name}
    if isinstance(state, dict):
        pairs = [(key, _flatten(value, f"{name}.{key}".lstrip("."), tensors)) for key, value in state.items()]
        if not all(isinstance(key, str | int) for key in state):
            raise TypeError(f"{name or 'state'} has keys that are neither strings nor integers")
        return {"dict": pairs}
    if isinstance(state, list | tuple):
        items = [_flatten(value, f"{name}.{i}".lstrip("."), tensors) for i, value in enumerate(state)]
        return {"tuple" if isinstance(state, tuple) else "list": items}
    if isinstance(state, _PLAIN):
        return state
    raise TypeError(
        f"{name or 'state'} is a {type(state).__name__}: must be a tensor, a dict, list or tuple, a string, a number, "
        "a bool or None"
    )


class CheckpointWriter:
    """Write the checkpoints of a run. Create one on every rank; leaving its context waits for a pending write.

    Args:
        parent: the run's folder of checkpoints.
        in_background: `save` copies the tensors and returns; a thread writes them, one checkpoint at a time.
        keep: number of newest checkpoints to keep; None: all.
    Ranks: the whole world.
    """

    def __init__(self, parent: Path, *, in_background: bool = False, keep: int | None = None) -> None:
        self._parent, self._keep, self._in_background = parent, keep, in_background
        self._group: dist.ProcessGroup | None = None
        self._pending: Callable[[], None] | None = None
        if in_background and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")  # separate from training's collectives

    def save(self, checkpoint: Checkpoint) -> None:
        """Save a checkpoint. Call it on every rank; tensors may be DTensors.

        Raises: OSError: this checkpoint, or the previous background write, failed.
        """
        self.wait()
        if self._in_background:
            self._pending = save_checkpoint_in_background(self._parent, checkpoint, self._group, keep=self._keep)
        else:
            save_checkpoint(self._parent, checkpoint, keep=self._keep)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Raises: OSError: it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.wait()
