"""A pool of worker processes, kept for the whole test session, on which functions run as ranks."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_cp.launch.rendezvous import listen
from tests.harness import warm
from tests.harness.strict import Coordinator, Strict
from tests.harness.worker import Job, Reply

MAX_WORLD = 8
GRACE_S = 3.0  # for the other ranks, once one has failed
_STRICT_SLOWDOWN = 5.0  # each operation goes through one process; hangs are found without the limit


class RankFailure(AssertionError):
    """A rank raised an error, hung or died."""


@dataclass(frozen=True)
class _Worker:
    process: subprocess.Popen[str]
    connection: Connection
    log: Path


class RankPool:
    """Run a module-level function on every rank of a world and return the results, in rank order.

    pool(3, function, *args) calls function(rank, 3, *args) in three processes with a gloo group of three ranks (without
    a group with `init=False`). RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are always set. If a rank
    raises, the call fails with its traceback. If a rank does not finish within `timeout_s`, the call fails with the
    stacks of all its threads. After a failure all workers are replaced.

    Attributes:
        strict: the default of `strict=`: replace gloo by a stand-in for NCCL (`tests/harness/strict`); False: do not.
    """

    def __init__(self, strict: Strict | bool = False) -> None:
        self.strict = strict
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._store: dist.TCPStore | None = None
        self._jobs = 0

    def __call__(
        self,
        world: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 180.0,
        init: bool = True,
        strict: Strict | bool | None = None,
    ) -> list[Any]:
        assert 1 <= world <= MAX_WORLD, f"world={world}: the pool has {MAX_WORLD} workers"
        self._grow(world)
        assert self._store is not None, "the pool has been grown"
        self._jobs += 1
        strict = self.strict if strict is None else strict
        timeout_s *= _STRICT_SLOWDOWN if strict else 1.0
        job = Job(self._jobs, 0, world, function, args, init, timeout_s, self._store.port, _free_port())
        if strict:
            settings = Strict() if strict is True else strict
            with Coordinator(world, settings) as coordinator:
                job = replace(job, strict=settings, coordinator=coordinator.address)
                replies, report = self._run(job)
                if coordinator.fault:
                    report.insert(0, coordinator.fault)
        else:
            replies, report = self._run(job)
        if report:
            self._end_workers()
            raise RankFailure(f"{function.__module__}.{function.__qualname__} at {world} ranks\n" + "\n".join(report))
        return [pickle.loads(replies[rank].result) for rank in range(world)]

    def _run(self, job: Job) -> tuple[dict[int, Reply], list[str]]:
        for rank in range(job.world):
            self._workers[rank].connection.send_bytes(pickle.dumps(replace(job, rank=rank)))
        return self._collect(job.world, job.timeout_s)

    def close(self) -> None:
        """End all workers, for good."""
        self._end_workers()
        self._folder.cleanup()

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
            warm.KEPT.remove(worker.process.pid)
        self._workers, self._store = [], None

    def _collect(self, world: int, timeout_s: float) -> tuple[dict[int, Reply], list[str]]:
        deadline = time.monotonic() + timeout_s
        replies: dict[int, Reply] = {}
        report: list[str] = []
        missing = {self._workers[rank].connection: rank for rank in range(world)}
        while missing:
            ready = wait(list(missing), max(0.0, deadline - time.monotonic()))
            if not ready:
                report += [self._stacks(rank, timeout_s) for rank in missing.values()]
                break
            for connection in ready:
                assert isinstance(connection, Connection), "only connections are waited for"
                rank = missing.pop(connection)
                try:
                    reply: Reply = pickle.loads(connection.recv_bytes())
                    replies[rank], error = reply, reply.error
                except EOFError:
                    error = f"the process ended with exit code {self._workers[rank].process.wait(60)}"
                if error:
                    report.append(f"--- rank {rank} failed:\n{error}{self._output(rank)}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies, report

    def _stacks(self, rank: int, timeout_s: float) -> str:
        process = self._workers[rank].process
        if process.poll() is None:
            log, deadline = self._workers[rank].log, time.monotonic() + 60
            size = log.stat().st_size
            os.kill(process.pid, signal.SIGUSR1)
            while log.stat().st_size == size and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.3)  # until all is written
        return f"--- rank {rank} hung (limit {timeout_s} s, {GRACE_S} s once another failed):{self._output(rank)}"

    def _output(self, rank: int) -> str:
        text = self._workers[rank].log.read_text(errors="replace").strip()
        return f"\n--- its output:\n{text[-6000:]}" if text else ""

    def _grow(self, world: int) -> None:
        for worker in self._workers:
            worker.log.write_text("")
        if self._store is None:
            listener = listen()
            options = {"master_listen_fd": listener.fileno(), "timeout": timedelta(seconds=30)}
            self._store = dist.TCPStore(*listener.getsockname(), is_master=True, wait_for_workers=False, **options)
            listener.detach()
        while len(self._workers) < world:
            ours, theirs = Pipe()
            log = Path(self._folder.name) / f"{time.monotonic_ns()}.log"
            with log.open("a") as file:
                command = [sys.executable, "-c", "from tests.harness.worker import serve; serve()"]
                process = warm.Popen(
                    command, stdin=theirs.fileno(), stdout=file, stderr=file, env=warm.environment(), cwd=warm.ROOT
                )
            theirs.close()
            warm.KEPT.add(process.pid)
            self._workers.append(_Worker(process, ours, log))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
