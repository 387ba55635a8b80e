"""Write and read the files of a cache. A file that is there is whole: it is renamed to its name when it is on the disk.

So no writer needs a lock, also on other hosts: two that encode the same sample write the same tensors under one name.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from lightning_cp.checkpoint.folder import flush
from lightning_cp.errors import CacheError
from lightning_cp.files import check_links, check_regular, new_file, parse_json, read_regular, writing
from lightning_cp.finetune.families import Sample

TEMPORARY = ".tmp-"
"""Prefix of the names of unfinished files."""
_KEPT = "What was written before is kept: free some space if the disk is full, then run precompute again to continue"
_ABANDONED_S = 3600.0  # age of a temporary file that no writer still writes
_CRC, _BLANK = b'"crc32":"', b"00000000"  # before and instead of the checksum, which covers the rest of the file
_DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


def write_file(folder: Path, name: str, data: bytes) -> None:
    """Write a file of a cache under a temporary name, flush it to disk and rename it.

    Args: name: path of the file in the cache.
    Raises: OSError: it could not be written; an older file stays as it is.
    """
    path, scratch = folder / name, folder / f"{TEMPORARY}{uuid4().hex}"
    with writing(path, _KEPT):
        check_links(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            new_file(scratch).write_bytes(data)
            flush(scratch)
            os.rename(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary files of killed writers."""
    for path in folder.glob(f"{TEMPORARY}*"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _ABANDONED_S:
                path.unlink()


def write_tensors(folder: Path, name: str, tensors: Sample, facts: Mapping[str, Any]) -> None:
    """Write the tensors of a sample with its facts, plain values. Raises: see `write_file`."""
    data = save(dict(tensors), {"name": name, "facts": json.dumps(facts), "crc32": _BLANK.decode()})
    before, _, after = data.partition(_CRC + _BLANK)  # not in the facts: their quotes are escaped
    write_file(folder, name, b"%b%b%08x%b" % (before, _CRC, zlib.crc32(data), after))


def read_facts(folder: Path, name: str) -> Any:
    """Return the facts of a file from its header; None if there is no such file, or one that is not whole."""
    try:
        check_regular(folder / name)
        with safe_open(folder / name, framework="pt") as opened:
            header = opened.metadata() or {}
        return parse_json(header["facts"]) if header["name"] == name else None
    except (OSError, ValueError, KeyError, SafetensorError):
        return None


def read_tensors(folder: Path, name: str) -> Sample:
    """Return the tensors of a file. Raises: CacheError: it is missing, damaged, or the file of something else."""
    path = folder / name
    try:
        data = read_regular(path)
        at = data.find(_CRC) + len(_CRC)
        end = at + len(_BLANK)
        if data[at:end] != b"%08x" % zlib.crc32(memoryview(data)[end:], zlib.crc32(data[:at] + _BLANK)):
            raise ValueError("its checksum is not the one that was written")
        if f'"name":"{name}"'.encode() not in data:
            raise ValueError("it is the file of another sample")
        tensors: Sample = load(data)
    except (OSError, ValueError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CacheError(
            f"{path} is damaged, or cannot be read: {reason}. Delete it and run precompute again: it is encoded again"
        ) from error
    return tensors


def stored_copies(tensors: Sample, what: str) -> Sample:
    """Copy tensors to contiguous CPU memory. Raises: CacheError: they cannot be stored.

    Args: what: the sample, for the error.
    """
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or x.dtype not in _DTYPES or x.layout != torch.strided or x.is_meta:
            kind = f"{x.dtype} {x.layout} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
            raise CacheError(f"{what}: {name} is {kind}: must be a dense tensor of a bool, integer or float dtype")
    return {name: torch.clone(x.detach().cpu(), memory_format=torch.contiguous_format) for name, x in tensors.items()}
