"""Programs of ranks for the tests of the launcher. Imports no torch, so that a rank starts in a moment."""

import atexit
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from omegaconf import DictConfig

from lightning_cp.launch import channel
from lightning_cp.launch.cause import is_stopped
from lightning_cp.recipes.runs.command import reads_settings
from lightning_cp.recipes.settings.table import SettingsError

RANK = int(os.environ.get("RANK", "-1"))
FOREVER_S = 600.0


@reads_settings
def write_environment(config: DictConfig) -> None:
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    Path(config.folder, f"{RANK}.txt").write_text(" ".join(os.environ[name] for name in names))
    print(f"rank {RANK} speaks")
    print(f"rank {RANK} warns", file=sys.stderr)


@reads_settings
def refuse_on_one(config: DictConfig) -> None:
    if RANK == 1:
        raise SettingsError("shape=3 is not valid: must be 4")
    time.sleep(FOREVER_S)


@reads_settings
def raise_on_one_then_everywhere(config: DictConfig) -> None:
    if RANK == 1:
        raise RuntimeError("the first cause")
    while not Path(config.folder, "logs", "rank_1.traceback.txt").is_file():  # written after the report
        time.sleep(0.01)
    raise RuntimeError("connection closed by peer")


@reads_settings
def end_on_one(config: DictConfig) -> None:
    """End rank `rank` as `how` says; the others raise when their connection is closed."""
    if config.rank != RANK:
        with _connected(config, RANK) as connection:
            connection.read()
        raise ConnectionError("Connection closed by peer")
    for rank in set(range(int(os.environ["WORLD_SIZE"]))) - {RANK}:
        _connections.append(_connected(config, rank))
    _end(config.how)


_connections: list[IO[bytes]] = []  # as a process group, it lives until the interpreter ends


def _connected(config: DictConfig, rank: int) -> IO[bytes]:
    """A pipe from rank `config.rank` to another one."""
    return Path(config.folder, f"to_{rank}").open("wb" if config.rank == RANK else "rb", buffering=0)


def _end(how: str) -> None:
    kind, _, number = how.partition(" ")
    if kind == "signal":
        os.kill(os.getpid(), int(number))
        time.sleep(FOREVER_S)
    elif kind == "_exit":
        os._exit(int(number))
    elif kind == "exit":
        sys.exit(int(number))
    elif kind == "abort":
        os.abort()
    elif kind == "raise":
        raise RuntimeError("raised on purpose")
    elif kind == "workers":  # a forked child that outlives its parent, as a data worker may
        if os.fork() == 0:
            time.sleep(FOREVER_S)
        os._exit(9)
    elif kind != "return":
        raise AssertionError(how)


_open_files: list[IO[str]] = []
_handlers: list[object] = []  # ctypes frees a callback without a reference


@reads_settings
def leave_work_for_the_end(config: DictConfig) -> None:
    """Leave an open file, a thread and an exit handler of Python to the end, and a C exit handler that aborts."""
    folder = Path(config.folder)
    _open_files.append((folder / f"file_{RANK}").open("w"))
    _open_files[0].write("not flushed")
    gc.freeze()
    atexit.register((folder / f"handler_{RANK}").touch)
    threading.Thread(target=lambda: (time.sleep(0.5), (folder / f"thread_{RANK}").touch())).start()
    _handlers.append(ctypes.CFUNCTYPE(None)(os.abort))
    assert ctypes.CDLL(None).__cxa_atexit(_handlers[0], None, None) == 0


@reads_settings
def exit_apart(config: DictConfig) -> None:
    """All ranks leave by `sys.exit(0)`, rank 0 `later_s` after the others."""
    time.sleep(config.later_s if RANK == 0 else 0)
    sys.exit(0)


@reads_settings
def return_apart(config: DictConfig) -> None:
    """All ranks return, rank 0 `later_s` after the others; then it raises if `fails` is set."""
    time.sleep(config.later_s if RANK == 0 else 0)
    if RANK == 0 and config.get("fails"):
        raise LookupError("of its own")


@reads_settings
def warn_of_first(config: DictConfig) -> None:
    """Rank 0 is stopped; when it is, the others warn of a stall, and then continue it."""
    pid = Path(config.folder, "pid")
    if RANK == 0:
        pid.with_suffix(".new").write_text(str(os.getpid()))
        pid.with_suffix(".new").rename(pid)
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    while not pid.exists() or not is_stopped(int(pid.read_text())):
        time.sleep(0.02)
    waits = {"where": "in barrier", "unchanged_s": 9.0, "waits": True, "tick_s": 60.0, "timeout_s": 60.0}
    for _ in range(2):
        channel.send({"kind": "stall", **waits})
    Path(config.folder, f"warned_{RANK}").touch()
    while RANK == 1 and not all(Path(config.folder, f"warned_{rank}").exists() for rank in (1, 2, "all")):
        time.sleep(0.02)
    os.kill(int(pid.read_text()), signal.SIGCONT if RANK == 1 else 0)


@reads_settings
def write_nothing(config: DictConfig) -> None:
    """Rank 1 fails on a machine with full disks; the others wait."""
    try:
        Path(config.folder, f"probe_{RANK}").write_text("x")
    except OSError as error:
        if RANK == 1:
            raise LookupError(f"the cause, after: {error.strerror}") from None
    time.sleep(FOREVER_S)


@reads_settings
def start_and_wait(config: DictConfig) -> None:
    """Start a child that ignores SIGTERM, write both process ids to a file, and wait."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.pause()"])
    scratch = Path(config.folder, f".{RANK}")
    scratch.write_text(f"{os.getpid()} {child.pid}")
    scratch.rename(Path(config.folder, f"{RANK}.pids"))
    if config.get("fail") and RANK == 0:
        while not Path(config.folder, "1.pids").exists():
            time.sleep(0.01)
        raise RuntimeError("gone wrong")
    time.sleep(FOREVER_S)
