"""Read and verify the manifest of a checkpoint. Imports no torch, so that a bad path fails at once.

A checkpoint is a folder `step_<n>` with tensors in safetensors files and `manifest.json`, which lists the size and
CRC-32 of every file, and has a CRC-32 of its own. The folder gets this name after all files are written; a partial one
has another name.
"""

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_cp.files import new_file, open_regular, parse_json, read_regular

FORMAT = 3
MANIFEST = "manifest.json"
PARTIAL = ".partial_"
"""Prefix of a checkpoint's name while it is written."""
TREE = "tree"
"""Key of the checkpoint's facts: a tree of names that shows how the tensors of the states are nested."""
_CHUNK_BYTES, _MAX_BYTES = 1 << 20, 1 << 30


class CheckpointError(ValueError):
    """A checkpoint that is missing, truncated or changed."""


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum of one file."""

    size_bytes: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> "FileEntry":
        """Compute size and checksum; reads the file once."""
        size, crc = 0, 0
        with open_regular(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        return cls(size, crc)


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint.

    Args:
        step: number of finished training steps.
        saved_at_s: time of saving, seconds since the epoch.
        files: size and checksum by file name.
        facts: plain values saved with the tensors.
    """

    step: int
    saved_at_s: float
    files: dict[str, FileEntry]
    facts: dict[str, Any]

    @property
    def plain_facts(self) -> dict[str, Any]:
        """Facts given by the caller, without the tree of the states."""
        return {name: fact for name, fact in self.facts.items() if name != TREE}

    def write(self, folder: Path) -> None:
        """Write `manifest.json`."""
        fields = asdict(self)
        text = json.dumps({"format": FORMAT, "crc32": _checksum(fields), **fields}, indent=1)
        new_file(folder / MANIFEST).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint and verify the size and CRC-32 of every file.

    Raises: CheckpointError: a file is missing, truncated or changed.
    """
    manifest = parse_manifest(folder)
    verify_files(folder, manifest)
    return manifest


def parse_manifest(folder: Path) -> Manifest:
    """Read and check `manifest.json`, and no other file. Raises: CheckpointError: it is missing or damaged."""
    path = folder / MANIFEST
    try:
        if not path.is_file():
            raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}")
        fields = parse_json(read_regular(path, limit_bytes=_MAX_BYTES))
        version = fields.pop("format")
        if type(version) is int and version != FORMAT:
            raise CheckpointError(f"{folder} has format {version}; this version reads format {FORMAT}"[:500])
        if version != FORMAT:
            raise ValueError("it has no valid format number")
        if fields.pop("crc32") != _checksum(fields):
            raise ValueError("its values do not have its CRC-32")
        files = {name: FileEntry(**entry) for name, entry in fields.pop("files").items()}
        return Manifest(files=files, **fields)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise CheckpointError(f"{folder} is truncated or changed: its {MANIFEST} cannot be read: {reason}") from error


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields).encode())


def verify_files(folder: Path, manifest: Manifest) -> None:
    """Compare the files of a checkpoint with its manifest. Raises: CheckpointError: they differ."""
    try:
        for path in folder.glob("*.safetensors"):
            if path.name not in manifest.files:
                raise CheckpointError(f"{folder} was changed: {path.name} is not in its {MANIFEST}")
        for name, entry in manifest.files.items():
            if not (folder / name).is_file():
                raise CheckpointError(f"{folder} is truncated: {name} is missing")
            actual = FileEntry.of(folder / name)
            if actual != entry:
                raise CheckpointError(
                    f"{folder} is truncated or changed: {name} has {actual.size_bytes} bytes with CRC-32 {actual.crc32}"
                    f", but {entry.size_bytes} bytes with CRC-32 {entry.crc32} were written"
                )
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}") from error


def check_same_tensors(expected: dict[str, tuple[int, ...]], saved: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Compare tensor shapes by name. Raises: CheckpointError: tensors of the run and the checkpoint differ."""
    for name in sorted(expected.keys() | saved.keys()):
        if expected.get(name) != saved.get(name):
            raise CheckpointError(
                f"{folder} belongs to another model or optimizer: the shape of {name} is "
                f"{expected.get(name, 'absent')} in this run and {saved.get(name, 'absent')} in the checkpoint; use "
                "the settings of the checkpoint's run (its .hydra/config.yaml)"
            )
