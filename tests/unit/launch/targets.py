"""What ranks do in the tests of the launcher. Imports no torch, so that a rank starts in a moment."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from omegaconf import DictConfig

from lightning_cp.launch import SettingsError

RANK = int(os.environ.get("RANK", "-1"))


def tell(config: DictConfig) -> None:
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    Path(config.folder, f"{RANK}.txt").write_text(" ".join(os.environ[name] for name in names))
    print(f"rank {RANK} speaks")
    print(f"rank {RANK} warns", file=sys.stderr)


def refuse_on_one(config: DictConfig) -> None:
    if RANK == 1:
        raise SettingsError("shape=3 is not valid: must be 4")
    time.sleep(60)


def raise_on_one_then_everywhere(config: DictConfig) -> None:
    if RANK == 1:
        raise RuntimeError("the first cause")
    while not Path(config.folder, "logs", "rank_1.traceback.txt").is_file():  # written after the report
        time.sleep(0.01)
    raise RuntimeError("connection closed by peer")


def die_by_signal(config: DictConfig) -> None:
    if config.rank == RANK:
        os.kill(os.getpid(), config.signal)
    time.sleep(0.05)
    raise ConnectionError("connection closed by peer")


def leave(config: DictConfig) -> None:
    if RANK == 1:
        os._exit(7)
    time.sleep(60)


def start_and_wait(config: DictConfig) -> None:
    """Starts a process of its own, deaf to SIGTERM, writes down both ids, and waits."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.pause()"])
    scratch = Path(config.folder, f".{RANK}")
    scratch.write_text(f"{os.getpid()} {child.pid}")
    scratch.rename(Path(config.folder, f"{RANK}.pids"))
    if config.get("fail") and RANK == 0:
        time.sleep(0.3)
        raise RuntimeError("gone wrong")
    time.sleep(60)
