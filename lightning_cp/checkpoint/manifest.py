"""What makes a checkpoint complete, and where the newest one is. Imports no torch, so a bad path is refused at once.

A checkpoint is a folder `step_<n>` that holds tensors as safetensors files and `manifest.json`, which names every
file with its size and CRC-32. The folder gets its name when all of it is written, so a half-written one has none.
"""

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
CHECKPOINT_FORMATS = ("full", "distributed")
MANIFEST = "manifest.json"
TREES = "trees"
"""Among the facts: how the tensors of each state nest."""
_CHUNK_BYTES = 1 << 20
_DEPTHS = ("checkpoints/step_*", "*/checkpoints/step_*", "*/*/checkpoints/step_*", "*/*/*/checkpoints/step_*")


class CheckpointError(ValueError):
    """A checkpoint that is missing, cut short or changed."""


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum of one file."""

    size_bytes: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> "FileEntry":
        """Reads the file once."""
        size, crc = 0, 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        return cls(size, crc)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        step: of training, all of them done.
        saved_at_s: seconds since the epoch.
        files: by name.
        facts: plain values saved with the tensors.
    """

    step: int
    saved_at_s: float
    files: dict[str, FileEntry]
    facts: dict[str, Any]

    @property
    def plain_facts(self) -> dict[str, Any]:
        """Those that were given."""
        return {name: fact for name, fact in self.facts.items() if name != TREES}

    def write(self, folder: Path) -> None:
        """Writes `manifest.json`."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        (folder / MANIFEST).write_text(text, encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Reads and verifies a checkpoint: every file is there, whole and unchanged.

    Raises: CheckpointError: it is not.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MANIFEST}")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        version = fields.pop("format")
        files = {name: FileEntry(**entry) for name, entry in fields.pop("files").items()}
        manifest = Manifest(files=files, **fields)
        if not (isinstance(manifest.step, int) and isinstance(manifest.facts, dict)):
            raise TypeError("facts of another kind")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder} is cut short: its {MANIFEST} cannot be read") from error
    if version != FORMAT:
        raise CheckpointError(f"{folder} has format {version}; this version reads format {FORMAT}")
    for name, entry in files.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} is cut short: {name} is missing")
        found = FileEntry.of(folder / name)
        if found != entry:
            raise CheckpointError(
                f"{folder} is cut short or changed: {name} has {found.size_bytes} bytes with CRC-32 {found.crc32}, "
                f"and {entry.size_bytes} bytes with CRC-32 {entry.crc32} were written"
            )
    return manifest


def latest_checkpoint(root: Path) -> Path | None:
    """The newest complete checkpoint of the runs under a folder, or None. One that is cut short is passed over."""
    found: list[tuple[float, int, Path]] = []
    for pattern in _DEPTHS:
        for folder in root.glob(pattern):
            try:
                manifest = read_manifest(folder)
            except CheckpointError:
                continue
            found.append((manifest.saved_at_s, manifest.step, folder))
    return max(found)[2] if found else None


def find_checkpoint(resume: str, root: Path) -> Path:
    """The checkpoint that a `resume` setting names.

    Args:
        resume: `last`, or the folder of a checkpoint or of a run.
        root: where `last` looks.
    Raises: CheckpointError: there is none, or it is not complete.
    """
    if resume == "last":
        newest = latest_checkpoint(root)
        if newest is None:
            raise CheckpointError(f"resume=last: there is no complete checkpoint under {root}")
        return newest
    path = Path(resume)
    if not path.is_dir():
        kind = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"resume={resume} {kind}: must be `last`, or the folder of a checkpoint or of a run")
    if not path.name.startswith("step_") and (path / "checkpoints").is_dir():
        newest = latest_checkpoint(path)
        if newest is None:
            raise CheckpointError(f"resume={resume}: there is no complete checkpoint in this run")
        return newest
    try:
        read_manifest(path)
    except CheckpointError as error:
        raise CheckpointError(f"resume={resume}: {error}") from error
    return path


def check_same_tensors(here: dict[str, tuple[int, ...]], there: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Compares shapes by name. Raises: CheckpointError: a checkpoint has other tensors than are needed."""
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise CheckpointError(
                f"{folder} is of another model or optimizer: {name} is {here.get(name, 'absent')} here and "
                f"{there.get(name, 'absent')} there; use the settings of that run (its .hydra/config.yaml)"
            )
