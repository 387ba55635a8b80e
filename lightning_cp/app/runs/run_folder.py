"""Run folders: created for one run alone, and held while that run writes into them. Imports no torch."""

import atexit
import errno
import fcntl
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from typing_extensions import override

from lightning_cp.app.settings.table import SettingsError
from lightning_cp.launch.external import is_first, launcher_env

LOCK = ".lock"  # in a run folder: the lock, and in words who holds it
_ENDING_S = 3.0  # ranks of a launcher that was killed keep the lock until they have ended
_CANNOT_LOCK = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_REFUSED_EXIT_CODE = 2
_FIRST_REPORTS_S = 30.0  # within which rank 0 has reported a refusal, however busy the machine
_held: dict[Path, int] = {}  # folders that this process holds, and the descriptors of their locks


class ClaimFolder(Callback):
    """Hydra callback that settles the folder of a run or sweep before Hydra creates it.

    A name that contains the time (`${now:…}`) is for a new folder: it is created exclusively, with a suffix (`_2`,
    `_3`, …) where it exists. Any other name is a folder that the user chose: it is used as it is. Both are held until
    this process ends. Under an external launcher the first rank does this. The others write nothing: instead of a new
    folder they get a hidden one, which is removed at their end.
    """

    @override
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        _settle(config, "run")

    @override
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        _settle(config, "sweep")


def claim(wanted: Path) -> Path:
    """Create a folder that did not exist: `wanted`, else `wanted` with the first free suffix. Returns: its path."""
    folder, number = wanted, 1
    while True:
        try:
            folder.mkdir(parents=True)  # fails if it exists, also when several processes try at once
            return folder
        except FileExistsError:
            number += 1
            folder = wanted.with_name(f"{wanted.name}_{number}")


def hold(folder: Path, setting: str) -> int:
    """Lock a folder for this process, and for the ranks that inherit the lock's descriptor.

    The lock is a `flock`: the kernel releases it when the last process that has the descriptor ends, however it ends.
    Where the file system has no locks, a warning is printed and the folder is used without one.

    Args:
        folder: of a run or sweep; created if it does not exist.
        setting: name of the setting that chose it, for errors.
    Returns: the lock's descriptor.
    Raises: SettingsError: another process holds the folder, or it cannot be written to.
    """
    key = folder.resolve()
    if key in _held:
        return _held[key]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise not_writable(setting, folder, error) from error
    try:
        _lock(descriptor, folder, setting)
    except SettingsError:
        os.close(descriptor)
        raise
    _held[key] = descriptor
    return descriptor


def release(folder: Path) -> None:
    """Unlock a folder that this process holds."""
    os.close(_held.pop(folder.resolve()))


@contextmanager
def held(folder: Path, setting: str) -> Iterator[int]:
    """Hold a folder inside the context, or longer where this process held it before. See `hold`."""
    is_new = folder.resolve() not in _held
    descriptor = hold(folder, setting)
    try:
        yield descriptor
    finally:
        if is_new:
            release(folder)


def _lock(descriptor: int, folder: Path, setting: str) -> None:
    deadline = time.monotonic() + _ENDING_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
                raise SettingsError(
                    f"{setting}={folder} is in use by {holder}, or by ranks that it started: wait until that run "
                    "has ended, or use another folder"
                ) from None
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in _CANNOT_LOCK:
                raise SettingsError(f"{setting}={folder} cannot be locked: {error.strerror}") from error
            print(
                f"warning: {folder} is on a file system without locks ({error.strerror}): "
                "a second run in this folder will not be refused",
                file=sys.stderr,
            )
            break
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except OSError as error:
        raise not_writable(setting, folder, error) from error


def check_writable(folder: Path, setting: str) -> None:
    """Create a folder if it does not exist, and write a temporary file into it.

    Args: setting: name of the setting that chose the folder, for the error.
    Raises: SettingsError: one of the two is not possible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise not_writable(setting, folder, error) from error


def not_writable(setting: str, folder: Path, error: OSError, *, within: Path | None = None) -> SettingsError:
    """Make the error for a folder that cannot be written to.

    Args:
        setting: name of the setting.
        folder: its value.
        error: why it is not possible.
        within: the folder inside it that was to be created.
    """
    what = "cannot be written to" if within is None else f"is not usable, because {within} cannot be created"
    return SettingsError(
        f"{setting}={folder} {what}: {error.strerror}; set {setting} to a folder that can be written to"
    )


def _settle(config: DictConfig, kind: str) -> None:
    """Settle the folder of a run (`kind` run) or a multirun (`kind` sweep). Exits where it cannot be had."""
    key = f"hydra.{kind}.dir"
    try:
        wanted = Path(str(OmegaConf.select(config, key)))
    except OmegaConfBaseException:  # Hydra reports it when it reads the key itself
        return
    unresolved: Any = OmegaConf.to_container(config.hydra[kind], resolve=False)
    is_new = "${now:" in unresolved["dir"]
    first = is_first(launcher_env(os.environ))
    # Not `wanted` for other ranks, which may be another run's. Beside it, because resume=last looks at the runs there.
    folder = wanted.with_name(f".{wanted.name}_process_{socket.gethostname()}_{os.getpid()}")
    try:
        if first:
            folder = _claim(wanted, config, key) if is_new else wanted
            hold(folder, key)
        elif is_new:
            _claim(folder, config, key)
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
    except SettingsError as error:
        if first or _is_alone_in_refusing():
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(_REFUSED_EXIT_CODE) from None
    if is_new:
        config.hydra[kind].dir = str(folder)
    if is_new and kind == "sweep":  # each job composes its configuration from these overrides
        config.hydra.overrides.hydra.append(f"{key}={_quoted(folder)}")


def _is_alone_in_refusing() -> bool:
    """Under torchrun, whether rank 0 goes on: else its agent ends this process, which waits, once rank 0 has ended."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    time.sleep(_FIRST_REPORTS_S)
    return True


def _claim(wanted: Path, config: DictConfig, key: str) -> Path:
    try:
        return claim(wanted)
    except OSError as error:
        root = OmegaConf.select(config, "output_root", default=None)
        if root is not None and Path(str(root)) in wanted.parents:
            raise not_writable("output_root", Path(str(root)), error, within=wanted) from error
        raise not_writable(key, wanted, error) from error


def _quoted(folder: Path) -> str:
    """A path as a value in Hydra's grammar of overrides."""
    escaped = str(folder).replace("'", "\\'")
    return f"'{escaped}'"
