"""Find checkpoints, even while a run saves and deletes them."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from lightning_cp.checkpoint.folder import remove_abandoned
from lightning_cp.checkpoint.manifest import PARTIAL, CheckpointError, Manifest, parse_manifest, verify_files

_log = logging.getLogger(__name__)
_DEPTH = 3  # folder levels of runs below the root: date, time, number in a sweep
_ATTEMPTS, _PAUSE_S = 200, 0.02  # attempts, and pause between them, while another process replaces checkpoints


class _ChangedError(Exception):
    """A checkpoint was removed or replaced while it was read."""


def latest_checkpoint(root: Path, *, accept: Callable[[Path], bool] = lambda run: True) -> Path | None:
    """Find the newest complete checkpoint of the runs under a folder.

    Newer damaged checkpoints are skipped with a warning. The search is repeated if another process saves or deletes
    checkpoints during it.

    Args: accept: returns False for the folder of a run to leave out.
    Returns: the checkpoint's folder, or None.
    Raises: CheckpointError: other processes replace checkpoints faster than they can be read.
    """
    for _ in range(_ATTEMPTS):
        try:
            return _search(root, accept)
        except _ChangedError:
            time.sleep(_PAUSE_S)
    raise CheckpointError(
        f"checkpoints under {root} are replaced faster than they can be read: give the folder of one checkpoint"
    )


def find_checkpoint(resume: str, root: Path) -> Path:
    """Find the checkpoint that a `resume` setting names.

    Args:
        resume: `last`, or the folder of a checkpoint or of a run.
        root: folder that `last` searches.
    Raises: CheckpointError: no checkpoint found, or it is not complete.
    """
    if resume == "last":
        newest = latest_checkpoint(root)
        if newest is None:
            raise CheckpointError(f"resume=last: there is no complete checkpoint under {root}")
        return newest
    path = Path(resume)
    if not os.path.isdir(path):
        kind = "is a file" if os.path.exists(path) else "does not exist"
        raise CheckpointError(
            f"resume={resume} {kind}: must be `last`, the folder of a checkpoint or the folder of a run"
        )
    if not path.name.startswith("step_") and os.path.isdir(path / "checkpoints"):
        newest = latest_checkpoint(path)
        if newest is None:
            raise CheckpointError(f"resume={resume}: there is no complete checkpoint in this run")
        return newest
    try:
        verify_files(path, parse_manifest(path))
    except CheckpointError as error:
        raise CheckpointError(f"resume={resume}: {error}") from error
    return path


def remove_partials(root: Path) -> None:
    """Remove partial checkpoints of killed writers in the runs under a folder. Running writers are not affected."""
    for checkpoints in _checkpoint_folders(root):
        remove_abandoned(path for path in _children(checkpoints) if path.name.startswith(PARTIAL))


def _search(root: Path, accept: Callable[[Path], bool]) -> Path | None:
    listed = _listed(root)
    accepted = {run for run in {path.parents[1] for path in listed} if accept(run)}
    candidates = [_read(path, changed) for path, changed in listed.items() if path.parents[1] in accepted]
    for _, _, path, manifest in sorted(candidates, key=lambda one: one[:3], reverse=True):
        if isinstance(manifest, Manifest):
            try:
                verify_files(path, manifest)
                return path
            except CheckpointError as error:
                manifest = error
        if _listed(root) != listed:
            raise _ChangedError
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            _log.warning("skipped the newer checkpoint %s: %s", path, manifest)
    if _listed(root) != listed:  # what was listed may have been removed before it was read, and a newer one be there
        raise _ChangedError
    return None


def _listed(root: Path) -> dict[Path, tuple[int, int]]:
    """List what looks like a checkpoint, with numbers that change when another one takes its place."""
    names = (path for folder in _checkpoint_folders(root) for path in _children(folder))
    folders = (path for path in names if path.name.startswith("step_") and os.path.isdir(path))
    return {path: _fingerprint(path) for path in folders}


def _read(path: Path, changed: tuple[int, int]) -> tuple[float, int, Path, Manifest | CheckpointError]:
    """Return time of saving, or of the last change if it is unreadable; step; path; manifest or error."""
    try:
        manifest = parse_manifest(path)
    except CheckpointError as error:
        return changed[1] / 1e9, -1, path, error
    return manifest.saved_at_s, manifest.step, path, manifest


def _fingerprint(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:  # it was removed, or may not be read
        return (0, 0)
    return status.st_ino, status.st_mtime_ns


def _checkpoint_folders(root: Path) -> Iterator[Path]:
    runs = [root]
    for depth in range(_DEPTH + 1):
        for run in runs:
            yield run / "checkpoints"
        if depth < _DEPTH:
            runs = [path for run in runs for path in _children(run) if os.path.isdir(path)]


def _children(folder: Path) -> list[Path]:
    """List a folder, sorted; empty if it is not a folder, was removed or cannot be read."""
    try:
        return sorted(folder / name for name in os.listdir(folder))
    except OSError:
        return []
