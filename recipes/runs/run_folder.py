"""Create run folders and lock each one while its run writes into it. Imports no torch."""

import atexit
import errno
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from typing_extensions import override

from lightning_cp.launch.rank import is_first, launcher_env
from lightning_cp.locks import lock, unlock
from lightning_cp.recipes.settings.table import SettingsError
from lightning_cp.recipes.terminal import print_error

LOCK = ".lock"  # lock file in a run folder; its text names the process that holds it
_WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_RELEASE_S = 3.0  # after a launcher is killed, its ranks keep the lock until they have ended
_REFUSED_EXIT_CODE = 2
_FIRST_REPORTS_S = 30.0  # rank 0 reports an error within this time, even on a busy machine
_locks: dict[Path, int] = {}  # folder -> descriptor of the lock that this process holds


class ClaimFolder(Callback):
    """Hydra callback that chooses and locks the folder of a run or sweep before Hydra creates it.

    If the configured name contains the time (`${now:…}`), a new folder is created exclusively; if it exists, a suffix
    is added (`_2`, `_3`, …). Any other name was chosen by the user and is used unchanged. The folder is locked until
    this process ends. Under an external launcher only the first rank does this. The other ranks write nothing there:
    instead of a new folder they get a hidden one, which is removed when they end.
    """

    @override
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        _choose_folder(config, "run")

    @override
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        _choose_folder(config, "sweep")


class CheckFolder(Callback):
    """Hydra callback that creates the folder of a run or sweep if it does not exist.

    It is for recipes that write nothing there. If the folder cannot be created, it prints one line and exits.
    """

    @override
    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        _create(config, "hydra.run.dir")

    @override
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        _create(config, "hydra.sweep.dir")


def _create(config: DictConfig, key: str) -> None:
    folder = _folder_in(config, key)
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print_error(not_writable(key, folder, error))
        raise SystemExit(_REFUSED_EXIT_CODE) from None


def _folder_in(config: DictConfig, key: str) -> Path | None:
    try:
        return Path(str(OmegaConf.select(config, key)))
    except OmegaConfBaseException:  # Hydra reports it when it reads the key itself
        return None


def claim(requested: Path) -> Path:
    """Create a new folder: `requested`, or `requested` with the first free suffix if it exists. Returns: its path."""
    folder, number = requested, 1
    while True:
        try:
            folder.mkdir(parents=True)  # fails if it exists, also when several processes try at once
            return folder
        except FileExistsError:
            number += 1
            folder = requested.with_name(f"{requested.name}_{number}")


def lock_folder(folder: Path, setting: str) -> int:
    """Lock a folder for this process, and for the ranks that inherit the lock's descriptor.

    On a file system without locks, a warning is printed and the folder is used without a lock.

    Args:
        folder: folder of a run or sweep; created if it does not exist.
        setting: name of the setting with this folder, for errors.
    Returns: file descriptor of the lock.
    Raises: SettingsError: another process holds the folder, or it cannot be written to.
    """
    key = folder.resolve()
    if key in _locks:
        return _locks[key]
    path, deadline = folder / LOCK, time.monotonic() + _RELEASE_S
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                descriptor, no_locks = lock(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, by_children=True)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
    except BlockingIOError:
        holder = path.read_text(errors="replace")[:200] or "another process"
        raise SettingsError(
            f"{setting}={folder} is in use by {holder}, or by ranks that it started: wait until that run has ended, or "
            "use another folder"
        ) from None
    except OSError as error:
        raise not_writable(setting, folder, error) from error
    if no_locks is not None and no_locks.errno not in _WITHOUT_LOCKS:
        unlock(descriptor)
        raise SettingsError(
            f"{setting}={folder} cannot be locked: {no_locks.strerror}; use another folder"
        ) from no_locks
    if no_locks is not None:
        print(
            f"warning: {folder} is on a file system without locks ({no_locks.strerror}): nothing prevents a second run "
            "in this folder",
            file=sys.stderr,
        )
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except OSError as error:
        unlock(descriptor)
        raise not_writable(setting, folder, error) from error
    _locks[key] = descriptor
    return descriptor


def unlock_folder(folder: Path) -> None:
    """Unlock a folder that this process holds."""
    unlock(_locks.pop(folder.resolve()))


@contextmanager
def locked(folder: Path, setting: str) -> Iterator[int]:
    """Hold a folder inside the context; if this process held it before, it stays held afterwards. See `lock_folder`."""
    is_new = folder.resolve() not in _locks
    descriptor = lock_folder(folder, setting)
    try:
        yield descriptor
    finally:
        if is_new:
            unlock_folder(folder)


def check_writable(folder: Path, setting: str) -> None:
    """Create a folder if it does not exist, and write a temporary file into it.

    Args: setting: name of the setting with this folder, for the error.
    Raises: SettingsError: the folder or the file cannot be created.
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
        folder: value of the setting.
        error: error of the operating system.
        within: folder inside `folder` that could not be created, if any.
    """
    problem = "cannot be written to" if within is None else f"is not usable, because {within} cannot be created"
    return SettingsError(
        f"{setting}={folder} {problem}: {error.strerror}; set {setting} to a folder that can be written to"
    )


def _choose_folder(config: DictConfig, kind: str) -> None:
    """Choose and lock the folder of a run (`kind` "run") or a multirun (`kind` "sweep"). Exits on error."""
    key = f"hydra.{kind}.dir"
    requested = _folder_in(config, key)
    if requested is None:
        return
    unresolved: Any = OmegaConf.to_container(config.hydra[kind], resolve=False)
    is_new = "${now:" in unresolved["dir"]
    is_rank_zero = is_first(launcher_env(os.environ))
    # Other ranks must not use `requested`, which may belong to another run. Their folder has the same parent, because
    # resume=last searches the runs there.
    folder = requested.with_name(f".{requested.name}_process_{socket.gethostname()}_{os.getpid()}")
    try:
        if is_rank_zero:
            folder = _claim(requested, config, key) if is_new else requested
            lock_folder(folder, key)
        elif is_new:
            _claim(folder, config, key)
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
    except SettingsError as error:
        refuse(error)
    if is_new:
        config.hydra[kind].dir = str(folder)
    if is_new and kind == "sweep":  # each job composes its configuration from these overrides
        config.hydra.overrides.hydra.append(f"{key}={QuotedString(str(folder), Quote.single).with_quotes()}")


def refuse(error: object) -> NoReturn:
    """Print a configuration error that all ranks of a launcher have, on the first rank, and exit with code 2."""
    if is_first(launcher_env(os.environ)) or only_this_rank_failed():
        print_error(error)
    raise SystemExit(_REFUSED_EXIT_CODE) from None


def only_this_rank_failed() -> bool:
    """Wait under torchrun for rank 0 to fail too, whereupon its agent ends this process; return True if it has not."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    time.sleep(_FIRST_REPORTS_S)
    return True


def _claim(requested: Path, config: DictConfig, key: str) -> Path:
    try:
        return claim(requested)
    except OSError as error:
        root = OmegaConf.select(config, "output_root", default=None)
        if root is not None and Path(str(root)) in requested.parents:
            raise not_writable("output_root", Path(str(root)), error, within=requested) from error
        raise not_writable(key, requested, error) from error
