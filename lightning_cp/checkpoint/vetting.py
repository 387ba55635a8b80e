"""Load Lightning's checkpoints, whoever wrote them, without running code that they hold."""

import io
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import model_parallel
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from typing_extensions import override

from lightning_cp.checkpoint.dcp_index import read_index
from lightning_cp.checkpoint.manifest import CheckpointError

_EXTRA = "meta.pt"  # what Lightning saves beside the folder's tensors


def allows_code(weights_only: bool | None) -> bool:
    """Whether the user lets a checkpoint run code: by the argument, or by torch's environment variable."""
    forced = os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0") in ("1", "y", "yes", "true")
    return weights_only is False or (weights_only is None and forced)


def check_file(path: Path) -> None:
    """Check that `torch.load(path, weights_only=True)` can read a file.

    Tensors stay on the disk: storage is mapped, which also stops a tensor from claiming more than the file holds.

    Raises: CheckpointError: it holds more than tensors and plain values, or is damaged.
    """
    mapped = zipfile.is_zipfile(path)  # else in torch's format before 1.6
    with _refused_as(str(path)):
        torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)


@contextmanager
def without_code(path: Path) -> Iterator[None]:
    """Inside, Lightning's ModelParallelStrategy loads this file or folder by reading it only.

    Raises: CheckpointError: it holds more than tensors and plain values, or is damaged.
    """
    if path.is_file():
        check_file(path)
    index = None
    if (path / _EXTRA).is_file():
        check_file(path / _EXTRA)
        index = read_index(path)  # once for the model and every optimizer
    lightning: Any = model_parallel
    before = lightning._distributed_checkpoint_load  # lets torch unpickle the index
    lightning._distributed_checkpoint_load = partial(load_dcp, index=index)
    try:
        yield
    finally:
        lightning._distributed_checkpoint_load = before


def load_dcp(state: dict[str, Any], path: Path, *, index: Metadata | None = None) -> None:
    """Fill a state from a folder that `torch.distributed.checkpoint.save` wrote. Call it on every rank.

    Args: index: of the folder, if it was read before.
    Raises: CheckpointError: it holds more than tensors and plain values, is damaged, or is of another state.
    """
    reader = _Reader(path, index or read_index(path))
    try:
        load(state, storage_reader=reader, planner=_Planner())
    except CheckpointException as error:  # a BaseException
        said = {rank: _reason(failure) for rank, (failure, _) in sorted(error.failures.items())}
        listed = "; ".join(f"rank {rank}: {reason}" for rank, reason in said.items())
        raise CheckpointError(f"{path} cannot be loaded: {listed}") from error


class _Reader(FileSystemReader):
    """Reads with an index that was checked."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    @override
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:  # without `kwargs`, torch asks for no index of a rank
        self._index.storage_meta = StorageMeta(load_id=self.load_id)
        return self._index


class _Planner(DefaultLoadPlanner):
    """Reads plain values as `weights_only` does."""

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        with _refused_as(read_item.dest_index.fqn):
            plain = torch.load(value, weights_only=True)
        ours = io.BytesIO()  # DefaultLoadPlanner unpickles it: what this process has written
        torch.save(plain, ours)
        ours.seek(0)
        super().load_bytes(read_item, ours)


@contextmanager
def _refused_as(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # torch lets through whatever a damaged file leads to
        if isinstance(error, OSError) and error.filename is not None:  # not found, no permission
            raise
        raise CheckpointError(f"{what} {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """What torch says in many words."""
    if isinstance(error, pickle.UnpicklingError):
        named = re.search(r"GLOBAL (\S+)", str(error))
        return (
            f"holds more than tensors and plain values ({named[1] if named else 'or is damaged'}): load it with "
            "weights_only=False only if you trust whoever wrote it"
        )
    if isinstance(error, CheckpointError | AssertionError | ValueError) or type(error) is RuntimeError:
        return " ".join(str(error).split())[:500]
    return f"is cut short or damaged ({type(error).__name__})"
