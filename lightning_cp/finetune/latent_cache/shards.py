"""Write and open the shards of a cache: safetensors files with the tensors of many samples."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_cp.checkpoint.folder import flush
from lightning_cp.checkpoint.manifest import FileEntry
from lightning_cp.errors import CacheError
from lightning_cp.files import check_regular, new_file, write_error
from lightning_cp.finetune.families import Sample
from lightning_cp.finetune.latent_cache.rows import ShardRow

TEMPORARY = ".tmp"
"""Prefix of the names of unfinished files, also in safetensors."""
Layout = dict[str, dict[str, tuple[str, tuple[int, ...]]]]  # key of the sample -> tensor name -> dtype and shape
_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


def stored_copies(tensors: Sample, what: str) -> Sample:
    """Copy tensors to contiguous CPU memory. Raises: CacheError: they cannot be stored.

    Args: what: the sample, for the error.
    """
    if not tensors:
        raise CacheError(f"{what} has no tensors")
    for name, x in tensors.items():
        if not name.isidentifier():
            raise CacheError(f"{what}: the tensor name {ascii(name)[:80]} must consist of letters, digits and _")
        if not isinstance(x, Tensor) or x.dtype not in _DTYPES or x.layout != torch.strided or x.is_meta:
            kind = f"{x.dtype} {x.layout} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
            raise CacheError(f"{what}: {name} is {kind}: must be a dense tensor of a bool, integer or float dtype")
    return {name: torch.clone(x.detach().cpu(), memory_format=torch.contiguous_format) for name, x in tensors.items()}


def write_shard(path: Path, samples: Mapping[str, Sample], *, cache_id: str) -> ShardRow:
    """Write a shard to a temporary name, flush it to disk and rename it.

    Raises: OSError: it could not be written; nothing stays.
    """
    tensors = {f"{key}/{name}": x for key, sample in samples.items() for name, x in sample.items()}
    scratch = path.with_name(f"{TEMPORARY}-{path.name}")
    try:
        try:
            save_file(tensors, new_file(scratch), metadata={"cache": cache_id})
        except SafetensorError as error:
            raise OSError(_code(str(error)), str(error)) from error
        scratch.chmod(stat.S_IMODE(path.parent.stat().st_mode) & 0o666)  # safetensors writes 0600
        entry = FileEntry.of(scratch)
        flush(scratch)
        os.rename(scratch, path)
        flush(path.parent)
    except Exception:
        scratch.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise
    return ShardRow(path.name, entry.size_bytes, entry.crc32, len(samples), cache_id)


def shard_error(path: Path, needed_bytes: int, error: OSError) -> OSError:
    """Return the error for a file that could not be written, with the folder, and the needed and free space."""
    try:
        free = f"{shutil.disk_usage(path.parent).free / 1e6:.1f} MB are free"
    except OSError:
        free = "the free space is unknown"
    reason = f"it needs {needed_bytes} bytes, {free} ({error.strerror or error})"
    kept = "What was written before is kept: free some space, then run precompute again to continue"
    return write_error(path, reason, error.errno or errno.EIO, kept)


def open_shard(path: Path, shard: ShardRow) -> Any:
    """Memory-map a shard, as a `safe_open` object. Raises: CacheError: it is missing, truncated or of another cache."""
    check_size(path, shard)
    try:
        opened: Any = safe_open(path, framework="pt")
        metadata = opened.metadata() or {}
    except Exception as error:  # a changed header can raise anything
        raise CacheError(f"{path} is damaged: {error}. {again(path)}") from error
    if metadata.get("cache") != shard.cache:
        raise CacheError(f"{path} belongs to another cache. {again(path)}")
    return opened


def check_size(path: Path, shard: ShardRow) -> None:
    """Raise CacheError if the file is missing or has another size: to read a truncated map would end the process."""
    try:
        check_regular(path)
        size = os.stat(path).st_size
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror or error}. {again(path)}") from error
    if size != shard.size_bytes:
        raise CacheError(f"{path} is damaged: it has {size} bytes, but {shard.size_bytes} were written. {again(path)}")


def read_layout(path: Path, shard: ShardRow) -> Layout:
    """Read names, dtypes and shapes of all tensors from the shard's header. Raises: CacheError: it is damaged."""
    opened, layout = open_shard(path, shard), Layout()
    try:
        for full_name in opened.keys():  # noqa: SIM118  # not a dict
            key, _, name = full_name.partition("/")
            described = opened.get_slice(full_name)
            layout.setdefault(key, {})[name] = (described.get_dtype(), tuple(described.get_shape()))
    except Exception as error:
        raise CacheError(f"{path} is damaged: {error}. {again(path)}") from error
    return layout


def again(path: Path) -> str:
    """Return how to replace a damaged shard, as a sentence."""
    kind, rank, _ = f"{path.name}--".split("-", 2)
    return (
        f"Restore the file, or delete the lines with {path.name} in rows-{rank}-{kind}.jsonl and run precompute again: "
        "it then encodes these samples again"
    )


def _code(text: str) -> int:
    """Return the error number in a message of safetensors, "… (os error 28)"; 0 if there is none."""
    _, _, number = text.rpartition("(os error ")
    digits = number.partition(")")[0]
    return int(digits) if digits.isdigit() else 0
