"""Load Lightning's checkpoints, even untrusted ones, without running code in them."""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cp.checkpoint.dcp_index import read_dcp_index
from lightning_cp.checkpoint.manifest import CheckpointError
from lightning_cp.checkpoint.store import reraise_as
from lightning_cp.compat.fabric_names import keeping_optimizers_without_state, loading_distributed_checkpoints_with

_EXTRA = "meta.pt"  # Lightning's file for values other than sharded tensors


def allows_code(weights_only: bool | None) -> bool:
    """Return whether the user allows a checkpoint to run code, by the argument or torch's environment variable."""
    forced = os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "0") in ("1", "y", "yes", "true")
    return weights_only is False or (weights_only is None and forced)


def check_file(path: Path) -> None:
    """Check that `torch.load(path, weights_only=True)` can read a file.

    Tensors stay on disk: storage is memory-mapped, so that no tensor can be larger than the file.

    Raises: CheckpointError: it is damaged, or holds more than tensors and plain values.
    """
    mapped = zipfile.is_zipfile(path)  # False: the format of torch before 1.6
    with _as_checkpoint_error(str(path)):
        torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)


@contextmanager
def without_code(path: Path) -> Iterator[None]:
    """Make Lightning's ModelParallelStrategy load this file or folder without running code, inside the context.

    Raises: CheckpointError: it is damaged, or holds more than tensors and plain values.
    """
    if path.is_file():
        check_file(path)
    index = None
    if (path / _EXTRA).is_file():
        check_file(path / _EXTRA)
        index = read_dcp_index(path)  # read once for the model and all optimizers
    with loading_distributed_checkpoints_with(partial(load_dcp, index=index)):  # Lightning's unpickles the index
        yield


def load_dcp(state: dict[str, Any], path: Path, *, index: Metadata | None = None) -> None:
    """Load a folder written by `torch.distributed.checkpoint.save` into a state. Call it on every rank.

    Args: index: index of the folder, if already read.
    Raises: CheckpointError: it is damaged, does not fit the state, or holds more than tensors and plain values.
    """
    index = index or read_dcp_index(path)
    keys = sorted(index.state_dict_metadata)
    for name, values in state.items():
        is_optimizer = isinstance(values, dict) and values.keys() == {"state", "param_groups"}
        if is_optimizer:  # torch has given each parameter a state; a saved one has none before its first gradient
            values["state"] = {
                parameter: state
                for parameter, state in values["state"].items()
                if _has_prefix(keys, f"{name}.state.{parameter}.")
            }
    reader = _Reader(path, index)
    with reraise_as(CheckpointError, f"{path} cannot be loaded", _reason):
        load(state, storage_reader=reader, planner=_Planner())


class _Reader(FileSystemReader):
    """Read with an index that was already checked."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    @override
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:  # without `kwargs`, torch requests no per-rank index
        self._index.storage_meta = StorageMeta(load_id=self.load_id)
        return self._index


class _Planner(DefaultLoadPlanner):
    """Read plain values with `weights_only=True`."""

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        with _as_checkpoint_error(read_item.dest_index.fqn):
            plain = torch.load(value, weights_only=True)
        repickled = io.BytesIO()  # re-pickled here, so that DefaultLoadPlanner can unpickle it safely
        torch.save(plain, repickled)
        repickled.seek(0)
        super().load_bytes(read_item, repickled)


@contextmanager
def _as_checkpoint_error(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged file can raise anything
        if isinstance(error, OSError) and error.filename is not None:  # not found, no permission
            raise
        raise CheckpointError(f"{name} {_reason(error)}") from error


def _has_prefix(keys: list[str], prefix: str) -> bool:
    """Return whether one of the sorted keys begins with a prefix."""
    at = bisect_left(keys, prefix)
    return at < len(keys) and keys[at].startswith(prefix)


def _reason(error: BaseException) -> str:
    """Shorten torch's error message."""
    if isinstance(error, pickle.UnpicklingError):
        match = re.search(r"GLOBAL (\S+)", str(error))
        return (
            f"holds more than tensors and plain values ({match[1] if match else 'or is damaged'}): load it with "
            "weights_only=False only if you trust whoever wrote it"
        )
    if isinstance(error, CheckpointError | AssertionError | ValueError) or type(error) is RuntimeError:
        return " ".join(str(error).split())[:500]
    return f"is truncated or damaged ({type(error).__name__})"


def load_optimizer_state(
    module: nn.Module, optimizer: Optimizer, *, optim_state_dict: dict[str, Any], options: StateDictOptions
) -> None:
    """Load a state as `set_optimizer_state_dict` does, also one that was saved without sharding. Call it on every rank.

    Keys are names, or numbers of `torch.optim.Optimizer.state_dict`: number i is the i-th parameter of the parameter
    groups, as in `Optimizer.load_state_dict`. A parameter without a saved state gets none, because it had no gradient.

    Args: optim_state_dict: the state, equal on all ranks; tensors are whole, or sharded as here.
    Raises: CheckpointError: its parameter groups or shapes are not those of the optimizer.
    """
    with keeping_optimizers_without_state():
        here: dict[str, Any] = get_optimizer_state_dict(module, optimizer)
    names = [list(group["params"]) for group in here["param_groups"]]
    try:
        saved = _by_name(optim_state_dict, names, strict=options.strict)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"a saved optimizer state is damaged: {type(error).__name__}: {error}") from error
    if saved["state"]:
        started: dict[str, Any] = get_optimizer_state_dict(module, optimizer)  # torch starts a state
        _check_shapes(saved["state"], started["state"])
        for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=False):
            group.update({key: x for key, x in values.items() if key not in group})  # values of its first step
        set_optimizer_state_dict(module, optimizer, optim_state_dict=saved, options=replace(options, strict=False))
    else:  # SGD, or an optimizer that has not stepped
        optimizer.load_state_dict(saved)
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for name, parameter in zip(chain.from_iterable(names), parameters, strict=True):
        if name not in saved["state"]:
            optimizer.state.pop(parameter, None)


def _by_name(saved: dict[str, Any], names: list[list[str]], *, strict: bool) -> dict[str, Any]:
    """Return the saved state with names as keys. Raises: CheckpointError: it has other parameter groups.

    Args: names: names of the parameters in each parameter group here.
    """
    groups = saved["param_groups"]
    keys = [list(group["params"]) for group in groups]
    if any(isinstance(key, str) for key in chain.from_iterable(keys)):
        missing = sorted({*chain.from_iterable(names)}.difference(*keys))
        if missing and strict:
            raise CheckpointError(
                f"the saved optimizer had no parameter {missing[0]} ({len(missing)} are missing): create the optimizer "
                "with the parameters that it had, or load with strict=False"
            )
        return saved
    sizes, expected = [len(group) for group in keys], [len(group) for group in names]
    if sizes != expected:
        raise CheckpointError(
            f"the saved optimizer had parameter groups of {sizes} parameters, and this one has {expected}: create it "
            "with the same parameters, in the same order"
        )
    name_of = dict(zip(chain.from_iterable(keys), chain.from_iterable(names), strict=True))
    return {
        "state": {name_of[key]: state for key, state in saved["state"].items()},
        "param_groups": [{**group, "params": group_names} for group, group_names in zip(groups, names, strict=True)],
    }


def _check_shapes(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Compare the shapes of all states. Raises: CheckpointError: a saved one belongs to another parameter."""
    for name, state in saved.items():
        for key, x in state.items():
            other = here.get(name, {}).get(key)
            if isinstance(x, Tensor) and isinstance(other, Tensor) and x.shape != other.shape:
                raise CheckpointError(
                    f"the saved optimizer state {key} of {name} has shape {tuple(x.shape)}, and the optimizer here has "
                    f"{tuple(other.shape)}: create the optimizer with the same parameters, in the same order"
                )
