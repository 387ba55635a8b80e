"""Leaks of a test: a process group, a child process, a thread, an environment variable."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil
import torch.distributed as dist

from tests.harness import warm

_GRACE_S = 60.0
_OF_INDUCTOR = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TRITON_PTXAS_PATH",
    "TRITON_LIBDEVICE_PATH",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
)
_IGNORED = ("PYTEST_CURRENT_TEST", *_OF_INDUCTOR)  # inductor sets its variables when it is first used
# tqdm's, one for the life of the process; threads that no Python code started, such as autograd's for a GPU
_THREADS_OF_LIBRARIES = ("TMonitor", "_DummyThread")


@dataclass(frozen=True)
class Surroundings:
    """The process's state around a test."""

    environment: dict[str, str]
    threads: frozenset[threading.Thread]
    children: frozenset[int]
    in_group: bool


def running_threads() -> frozenset[threading.Thread]:
    """Return the running threads that a test must end."""
    return frozenset(t for t in threading.enumerate() if type(t).__name__ not in _THREADS_OF_LIBRARIES)


def surroundings() -> Surroundings:
    """Return the current state."""
    environment = {name: value for name, value in os.environ.items() if name not in _IGNORED}
    return Surroundings(environment, running_threads(), _children(), dist.is_initialized())


def left_behind(before: Surroundings) -> list[str]:
    """List in words the leaks since `before`; it is undone as far as possible."""
    after = surroundings()
    deadline = time.monotonic() + _GRACE_S
    while (after.threads - before.threads or after.children - before.children) and time.monotonic() < deadline:
        time.sleep(0.02)
        after = surroundings()
    leaks = [f"thread {thread.name!r}" for thread in after.threads - before.threads]
    for pid in after.children - before.children:
        child = psutil.Process(pid)
        leaks.append(f"child process {pid}: {' '.join(child.cmdline())[:200]}")
        child.kill()
    if after.in_group and not before.in_group:
        leaks.append("process group")
        dist.destroy_process_group()
    if after.environment != before.environment:
        names = {name for name, _ in after.environment.items() ^ before.environment.items()}
        leaks.append(f"environment variables {sorted(names)}")
        for name in names:
            os.environ.pop(name, None)
            if name in before.environment:
                os.environ[name] = before.environment[name]
    return leaks


def _children() -> frozenset[int]:
    """Return the running direct children, without those of the harness."""
    trackers = (
        getattr(forkserver._forkserver, "_forkserver_pid", None),
        getattr(resource_tracker._resource_tracker, "_pid", None),
    )
    harness = {*trackers, *warm.KEPT}
    return frozenset(pid for pid in _child_pids() - harness if _runs(pid))


def _child_pids() -> set[int]:
    """Return the ids of all direct children. Linux lists them; psutil looks at every process of the machine."""
    lists = list(Path("/proc/self/task").glob("*/children"))
    if not lists:
        return {child.pid for child in psutil.Process().children()}
    return {int(pid) for path in lists for pid in _text(path).split()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended; its children are those of another one
        return ""


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
