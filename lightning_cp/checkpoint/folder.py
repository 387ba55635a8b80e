"""Write a checkpoint's folder all or nothing, lock it while its process runs, and remove those of ended processes."""

import ctypes
import errno
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_cp.checkpoint.manifest import PARTIAL, Manifest
from lightning_cp.files import new_file, writing
from lightning_cp.locks import lock, unlock

_OWNER = ".owner"
_IDLE_S, _FOREIGN_IDLE_S = 5.0, 3600.0  # long for other hosts: some file systems do not share locks
EARLIER_KEPT = "Earlier checkpoints are kept"
_OLDER_KEPT = "An older version of it is unchanged"
_REPLACED, _REMOVED = ".replaced", f"{PARTIAL}removed_"
_locks: dict[Path, int] = {}  # scratch folders of this process, and the descriptors that lock them
_PREFIX = "lightning_cp_run_"


def lock_new_folder(make: Callable[[], Path]) -> tuple[Path, int]:
    """Make a folder and lock it (shared `flock`).

    Args: make: function that makes a new folder; called again if another process removed it before it was locked.
    Returns: the folder, and the descriptor of its lock.
    """
    while True:
        folder, descriptor = make(), -1
        try:
            descriptor, _ = lock(folder, shared=True)  # without locks `remove_abandoned` removes only with `at_once`
            with writing(folder / _OWNER), open(folder / _OWNER, "x", encoding="utf-8") as owner:
                owner.write(socket.gethostname())
            return folder, descriptor
        except BaseException as error:
            unlock(descriptor)
            if isinstance(error, OSError) and error.errno == errno.ENOENT:
                continue  # it was removed
            shutil.rmtree(folder, ignore_errors=True)
            raise


def remove_owner_file(folder: Path) -> None:
    """Remove the file that names the folder's owner host."""
    (folder / _OWNER).unlink(missing_ok=True)


def remove_abandoned(folders: Iterable[Path], *, at_once: bool = False) -> None:
    """Remove this user's folders left by processes that have ended.

    Args: at_once: True if only one process may write here: every unlocked folder is removed. False: a folder without
        an owner must be unchanged for some seconds, and a folder of another host for an hour.
    """
    for folder in folders:
        with suppress(OSError):  # gone already, not readable, or locked by its process
            if folder.lstat().st_uid == os.getuid():
                _remove_abandoned(folder, at_once=at_once)


def _remove_abandoned(folder: Path, *, at_once: bool) -> None:
    descriptor, no_locks = lock(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        changed = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
        if at_once or (no_locks is None and time.time() - changed > _wait_s(folder)):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        unlock(descriptor)


def _wait_s(folder: Path) -> float:
    owner = folder / _OWNER
    name = owner.read_text(encoding="utf-8", errors="replace") if owner.is_file() else ""
    if not name:  # it is being made, or its process was killed before it wrote the name
        return _IDLE_S
    return -1.0 if name == socket.gethostname() else _FOREIGN_IDLE_S


def checkpoint_path(parent: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return parent / f"step_{step:08d}"


def scratch_path(parent: Path, step: int) -> Path:
    """Return the scratch folder of a step, the same on every rank."""
    return parent / f"{PARTIAL}{step:08d}"


def open_scratch(parent: Path, step: int) -> Path:
    """Make an empty scratch folder, locked by this process until `seal` or `drop_scratch`.

    Remove scratch folders of killed writers in `parent`. Raises: OSError: another process is writing this checkpoint.
    """
    drop_scratch(parent, step)
    remove_abandoned(parent.glob(f"{PARTIAL}*"), at_once=True)
    scratch = scratch_path(parent, step)

    def make() -> Path:
        try:
            scratch.mkdir(parents=True)
        except FileExistsError as error:
            raise FileExistsError(
                f"{scratch} is being written by another process: give each run its own folder"
            ) from error
        return scratch

    scratch, _locks[scratch] = lock_new_folder(make)
    return scratch


def drop_scratch(parent: Path, step: int) -> None:
    """Remove the scratch folder of this process, if there is one."""
    scratch = scratch_path(parent, step)
    if scratch in _locks:
        shutil.rmtree(scratch, ignore_errors=True)
        unlock(_locks.pop(scratch))


def seal(parent: Path, manifest: Manifest, *, keep: int | None) -> Path:
    """Rename the scratch folder to its final name, then remove all but the newest `keep` checkpoints."""
    folder, scratch = checkpoint_path(parent, manifest.step), scratch_path(parent, manifest.step)
    manifest.write(scratch)
    follow_umask(scratch)
    replace_folder(scratch, folder)
    remove_owner_file(folder)
    if scratch in _locks:
        unlock(_locks.pop(scratch))
    for old in parent.glob(f"step_*{_REPLACED}"):  # left by a writer that was killed during the exchange
        _remove_atomically(old)
    others = sorted(path for path in parent.glob("step_[0-9]*") if path != folder)  # may include later steps
    for old in [] if keep is None else others[: max(0, len(others) - keep + 1)]:
        _remove_atomically(old)
    return folder


def follow_umask(folder: Path) -> None:
    """Give files the permissions of the folder, which follow the umask: safetensors writes 0600."""
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)


def _remove_atomically(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that no reader finds a partial one under its name."""
    old = folder.with_name(f"{_REMOVED}{folder.name}")
    shutil.rmtree(old, ignore_errors=True)
    with suppress(FileNotFoundError):
        folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def replace_folder(scratch: Path, target: Path) -> None:
    """Flush a file or folder to disk and rename it to `target`; an older `target` is removed.

    Where the system can exchange two names, `target` is complete at any time. Elsewhere, an older `target` has the
    suffix `.replaced` for a moment.
    """
    for path in (*scratch.rglob("*"), scratch):
        flush(path)
    old = target.with_name(f"{target.name}{_REPLACED}")
    remove(old)
    blocks_rename = target.is_dir() or (
        scratch.is_dir() and target.exists()
    )  # only a file can replace a file in one step
    if blocks_rename and exchange_folders(scratch, target):
        old = scratch
    else:
        if blocks_rename:
            target.rename(old)
        scratch.replace(target)
    flush(target.parent)
    remove(old)


def exchange_folders(one: Path, other: Path) -> bool:
    """Exchange the names of two files or folders atomically. Returns: whether the system can (Linux, most disks)."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    working_directory, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(working_directory, os.fsencode(one), working_directory, os.fsencode(other), swap) == 0)


def scratch_folder_for(target: Path) -> Path:
    """Return the scratch path of a file or folder to be replaced. (torch.save refuses a leading dot.)"""
    return target.with_name(f"{target.name}.partial")


def flush(path: Path) -> None:
    """Flush a file or folder to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, link or folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def atomic_file(target: Path, *, mode: int = 0o666) -> Iterator[Path]:
    """Yield a scratch path; the file written there replaces `target` when the context ends without an error.

    Args: mode: permissions, reduced by the umask.
    """
    scratch = scratch_folder_for(target)
    remove(scratch)
    try:
        with writing(target, _OLDER_KEPT):
            new_file(scratch, mode=mode)
            mode = stat.S_IMODE(scratch.stat().st_mode)
            yield scratch
            scratch.chmod(mode)  # it follows the umask; safetensors writes 0600
            replace_folder(scratch, target)
    except BaseException:
        remove(scratch)
        raise


@contextmanager
def atomic_folder(folder: Path, *, replaces: str = "") -> Iterator[Path]:
    """Yield a scratch folder; its files are moved into `folder` when the context ends without an error.

    Args: replaces: glob pattern of old files to remove if they were not written again; other files stay.
    """
    scratch = scratch_folder_for(folder)
    remove(scratch)
    try:
        with writing(folder, _OLDER_KEPT):
            scratch.mkdir(parents=True)
            yield scratch
    except BaseException:
        remove(scratch)
        raise
    follow_umask(scratch)
    if not folder.exists():
        replace_folder(scratch, folder)
        return
    written = [path.name for path in scratch.iterdir()]
    for name in written:
        replace_folder(scratch / name, folder / name)
    for old in folder.glob(replaces) if replaces else ():
        if old.name not in written:
            remove(old)
    scratch.rmdir()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a temporary folder, and remove leftovers of this user's killed launchers."""
    remove_abandoned(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"))
    folder, descriptor = lock_new_folder(lambda: Path(tempfile.mkdtemp(prefix=_PREFIX)))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        unlock(descriptor)
