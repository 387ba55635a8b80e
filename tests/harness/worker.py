"""Run jobs in a worker process of the pool, one after another, each with a new process group."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.launch import processes
from lightning_cp.launch.stall import stop_watch
from tests.harness.leaks import running_threads
from tests.harness.strict.messages import Strict

# Warnings are errors in workers too. Third-party noise that is not ours to fix: (message, category, module).
IGNORED_WARNINGS: tuple[tuple[str, type[Warning], str], ...] = (
    # torch's own modules, while they are imported or traced
    (r".*", DeprecationWarning, r"torch\..*"),
    (r".*", FutureWarning, r"torch\..*"),
    # Chroma's, and FLUX's ControlNet's, own __init__
    (r"`FluxPosEmbed` is deprecated.*", FutureWarning, r".*"),
    # diffusers' flow schedulers, given their timesteps as a tensor
    (r"__array__ implementation.*", DeprecationWarning, r"diffusers\.schedulers\..*"),
    # data workers that Python forks, since 3.12
    (r".*multi-threaded, use of fork\(\) may lead to deadlocks.*", DeprecationWarning, r".*"),
    # Mochi asks for float32 autocast, on a CPU too
    (r"In CPU autocast, but the target dtype.*", UserWarning, r"diffusers\..*"),
    # lightning_cp sets the time-out of each group; a strict one has none
    (r"Set timeout is now only supported for.*", UserWarning, r".*"),
)

_GRACE_S = 60.0  # for the threads of a job


@dataclass(frozen=True)
class Job:
    """One call of a function on one rank."""

    number: int
    rank: int
    world: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    init: bool
    timeout_s: float
    store_port: int
    free_port: int
    strict: Strict | None = None
    coordinator: str = ""


@dataclass(frozen=True)
class Reply:
    """Outcome of a job: a result (pickled), or the traceback of what was raised."""

    result: bytes = b""
    error: str = ""


def serve() -> None:
    """Run jobs that come on stdin until the pool closes it. Output goes to the pool's log."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: also when the test run is killed
    connection = Connection(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # programs that a job starts must not read its messages
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    processes.subprocess = subprocess  # type: ignore[attr-defined]  # a rank has threads, so it must not fork others
    torch.set_num_threads(1)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            os._exit(0)
        reply = _run(message)
        connection.send_bytes(pickle.dumps(reply))


def _run(message: bytes) -> Reply:
    try:
        with _clean_state():
            job: Job = pickle.loads(message)
            os.environ.update(
                RANK=str(job.rank),
                LOCAL_RANK=str(job.rank),
                WORLD_SIZE=str(job.world),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(job.free_port),
                GLOO_SOCKET_IFNAME="lo",
            )
            with _backend(job):
                if job.init:
                    _init_group(job)
                return Reply(result=pickle.dumps(job.function(job.rank, job.world, *job.args)))
    except BaseException:
        return Reply(error=traceback.format_exc())


def _backend(job: Job) -> AbstractContextManager[None]:
    if job.strict is None:
        return nullcontext()
    from tests.harness.strict.rank import strict_rank

    return strict_rank(job.coordinator, job.rank, job.strict)


def _init_group(job: Job) -> None:
    client = dist.TCPStore("127.0.0.1", job.store_port, is_master=False, timeout=timedelta(seconds=30))
    store = dist.PrefixStore(f"job{job.number}", client)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=job.rank,
        world_size=job.world,
        timeout=timedelta(seconds=job.timeout_s + 30),  # the pool's own limit comes first
    )
    # A short job without a collective must not close its connections while other ranks still connect to each other.
    store.set(f"connected {job.rank}", "")
    store.wait([f"connected {rank}" for rank in range(job.world)])


@contextmanager
def _clean_state() -> Iterator[None]:
    """Remove the state that a job leaves behind. Raises an error if a thread still runs."""
    environment, threads = dict(os.environ), running_threads()
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for text, category, module in IGNORED_WARNINGS:
                warnings.filterwarnings("ignore", text, category, module)
            yield
    finally:
        if dist.is_initialized():
            stop_watch()
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(1)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        if torch.are_deterministic_algorithms_enabled():  # the setter imports much
            torch.use_deterministic_algorithms(False)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        gc.collect()
        gc.freeze()  # the next collection passes over modules that this job imported: they have 250,000 objects
    for thread in running_threads() - threads:
        thread.join(_GRACE_S)  # the stall watch sees the end of the process group at its next look
        assert not thread.is_alive(), f"the job left a thread behind: {thread}"
