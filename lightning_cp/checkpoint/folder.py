"""How a checkpoint's folder comes to be: it gets its name when all of it is written and flushed to disk."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_cp.checkpoint.manifest import MANIFEST, Manifest

_PARTIAL, _REPLACED = ".partial_", ".replaced"


def checkpoint_path(parent: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return parent / f"step_{step:08d}"


def scratch_path(parent: Path, step: int) -> Path:
    """Where it is written first; the same on every rank."""
    return parent / f"{_PARTIAL}{step:08d}"


def open_scratch(parent: Path, step: int) -> Path:
    """An empty folder to write into; what writers that were killed left behind goes."""
    for left in parent.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left, ignore_errors=True)
    scratch = scratch_path(parent, step)
    scratch.mkdir(parents=True)
    return scratch


def seal(parent: Path, manifest: Manifest, *, keep: int | None) -> Path:
    """Gives what was written its name, and then lets go of all but the newest `keep` checkpoints.

    One of the same step is moved aside first, under a name by which it is still found if this process is killed then.
    """
    folder, scratch = checkpoint_path(parent, manifest.step), scratch_path(parent, manifest.step)
    manifest.write(scratch)
    flush(scratch / MANIFEST)
    flush(scratch)
    if folder.exists():
        shutil.rmtree(folder.with_suffix(_REPLACED), ignore_errors=True)
        folder.rename(folder.with_suffix(_REPLACED))
    scratch.rename(folder)
    flush(parent)
    for aside in parent.glob(f"step_*{_REPLACED}"):
        shutil.rmtree(aside, ignore_errors=True)
    for old in [] if keep is None else sorted(parent.glob("step_*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def flush(path: Path) -> None:
    """What is written to a file or folder is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A folder to write into, which takes this one's place when the context ends without an error."""
    scratch, aside = folder.with_name(f"{_PARTIAL}{folder.name}"), folder.with_name(f"{folder.name}{_REPLACED}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        for path in scratch.rglob("*"):
            flush(path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
    scratch.rename(folder)
    flush(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)
