"""A pool of worker processes, kept for the whole test session, on which functions run as ranks."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_cp.launch.rendezvous import listen
from tests.harness.strict import Coordinator, Strict
from tests.harness.worker import Job, Reply, serve

# Otherwise the import of diffusers in the process that workers are forked from would take the GPUs from them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

MAX_WORLD = 8
GRACE_S = 3.0  # for the other ranks, once one has failed
_STRICT_SLOWDOWN = 5.0  # each operation goes through one process; hangs are found without the limit
_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "lightning_cp.attention",
    "pytest",
    "psutil",
)
_PRELOADED_IF_USED = {  # slow to import; by the module that a test file has imported
    "diffusers": ("diffusers.models.attention_dispatch", "diffusers.models.transformers.transformer_wan"),
    "tests.dist.engine.test_engine_models": ("functorch.compile",),  # what compiling imports
    "transformers": ("diffusers.pipelines.flux.pipeline_flux", "diffusers.pipelines.wan.pipeline_wan"),
    "lightning.fabric": ("lightning.fabric.strategies", "torch.distributed.fsdp"),
    "lightning.pytorch": ("lightning.pytorch.strategies", "torch.distributed.checkpoint"),
    "peft": ("peft",),
}


class RankFailure(AssertionError):
    """A rank raised an error, hung or died."""


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
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
            worker.process.join()
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
                    self._workers[rank].process.join(60)
                    error = f"the process ended with exit code {self._workers[rank].process.exitcode}"
                if error:
                    report.append(f"--- rank {rank} failed:\n{error}{self._output(rank)}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies, report

    def _stacks(self, rank: int, timeout_s: float) -> str:
        process = self._workers[rank].process
        if process.pid is not None and process.is_alive():
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
        context = multiprocessing.get_context("forkserver")  # imports torch once, in a process without threads
        used = [name for user, names in _PRELOADED_IF_USED.items() if user in sys.modules for name in names]
        context.set_forkserver_preload([*_PRELOADED, *used])
        while len(self._workers) < world:
            ours, theirs = context.Pipe()
            log = Path(self._folder.name) / f"{time.monotonic_ns()}.log"
            log.touch()
            process = context.Process(target=serve, args=(theirs, str(log)))
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, log))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
