"""How a checkpoint's folder comes to be: it gets its name when all of it is written and flushed to disk."""

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_cp.checkpoint.manifest import Manifest

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
    """Gives what was written its name, and then lets go of all but the newest `keep` checkpoints."""
    folder, scratch = checkpoint_path(parent, manifest.step), scratch_path(parent, manifest.step)
    manifest.write(scratch)
    take_place(scratch, folder)
    for aside in parent.glob(f"step_*{_REPLACED}"):  # of a writer that was killed just then
        shutil.rmtree(aside, ignore_errors=True)
    others = sorted(path for path in parent.glob("step_[0-9]*") if path != folder)  # some may be of later steps
    for old in [] if keep is None else others[: max(0, len(others) - keep + 1)]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def take_place(scratch: Path, target: Path) -> None:
    """Flushes a file or folder to disk and gives it its name; what had the name goes.

    The name always belongs to something whole, where the system can exchange two names; elsewhere, for a moment, an
    older one has its name with `.replaced` behind it.
    """
    for path in (*scratch.rglob("*"), scratch):
        flush(path)
    aside = target.with_name(f"{target.name}{_REPLACED}")
    remove(aside)
    in_the_way = target.is_dir() or (scratch.is_dir() and target.exists())  # only a file takes a file's name at once
    if in_the_way and exchange(scratch, target):
        aside = scratch
    else:
        if in_the_way:
            target.rename(aside)
        scratch.replace(target)
    flush(target.parent)
    remove(aside)


def exchange(one: Path, other: Path) -> bool:
    """Exchanges the names of two files or folders at once. Returns: whether the system could (Linux, most disks)."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), swap) == 0)


def scratch_for(target: Path) -> Path:
    """Where a file or folder is written that will then take this one's place. (torch.save refuses a leading dot.)"""
    return target.with_name(f"{target.name}.partial")


def flush(path: Path) -> None:
    """What is written to a file or folder is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """A file or folder goes, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def written_whole(folder: Path, *, replaces: str = "") -> Iterator[Path]:
    """A folder to write into, whose files take their places in this one when the context ends without an error.

    Args: replaces: files of these names (a pattern) that were not written again go; others stay.
    """
    scratch = scratch_for(folder)
    remove(scratch)
    scratch.mkdir(parents=True)
    try:
        yield scratch
    except BaseException:
        remove(scratch)
        raise
    if not folder.exists():
        take_place(scratch, folder)
        return
    written = [path.name for path in scratch.iterdir()]
    for name in written:
        take_place(scratch / name, folder / name)
    for old in folder.glob(replaces) if replaces else ():
        if old.name not in written:
            remove(old)
    scratch.rmdir()
