"""Start the ranks of a job as processes of this machine, watch them, and end them all when one fails."""

import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from typing_extensions import override

from lightning_cp.files import new_file
from lightning_cp.launch.cause import History
from lightning_cp.launch.channel import STOP_SIGNALS
from lightning_cp.launch.job import Failure, FailureKind, Job, Launcher, Result
from lightning_cp.launch.processes import EventKind, Processes
from lightning_cp.launch.rendezvous import listen, loopback_environment, rendezvous_environment

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from lightning_cp.launch.rank import main; main(sys.argv[2])"
)
_LOG_END_LINES, _LOG_END_BYTES = 30, 16 << 10


class StoppedBySignal(BaseException):
    """The launcher process received a stop signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number} ({signal.Signals(number).name})")
        self.number = number


@dataclass(frozen=True)
class LocalLauncher(Launcher):
    """Launch one process per rank on this machine, each in a new session, with a free loopback port for rendezvous.

    Args:
        grace_s: seconds that other ranks get to end and write their logs after the first failure. Ranks may also call
            `sys.exit(0)` instead of returning from the target, if all do so within this time.
        terminate_s: seconds between SIGTERM and SIGKILL.
        confirm_stop_s: seconds for a rank to confirm a stop request (SIGTERM, SIGINT or SIGUSR1 to this process).
        checkpoint_s: seconds for ranks to write a checkpoint after that; a second signal ends them at once.
        limit_s: time limit of a job, in seconds.
    """

    grace_s: float = 2.0
    terminate_s: float = 2.0
    confirm_stop_s: float = 10.0
    checkpoint_s: float = 60.0
    limit_s: float = math.inf

    @override
    def launch(self, job: Job) -> Result:
        job.log_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            lifeline, lifeline_writer = os.pipe()
            stack.callback(os.close, lifeline_writer)
            stack.callback(os.close, lifeline)
            ranks, history = Processes(stack.enter_context(_stop_pipe())), History()
            stack.callback(ranks.close)
            try:
                _start(job, lifeline, ranks)
                return _with_log_end(self._watch(ranks, history), job.log_dir)
            except StoppedBySignal as stop:
                message = self._request_stop(ranks, history, stop) if stop.number in STOP_SIGNALS else str(stop)
                return Result(Failure(-1, FailureKind.STOPPED, message, exit_code=128 + stop.number))
            finally:
                ranks.end(self.terminate_s)

    def _watch(self, ranks: Processes, history: History) -> Result:
        deadline = time.monotonic() + self.limit_s
        while True:
            _wait(ranks, history, deadline - time.monotonic())
            codes = ranks.codes()
            if history.has_failure(codes):
                self._wait_for_others(ranks, history)
                cause = history.first_cause(ranks.codes())
                if cause is not None:
                    return Result(cause)
                codes = ranks.codes()
            if all(code == 0 for code in codes):
                return Result()
            if time.monotonic() > deadline:
                slow = codes.index(None)
                return Result(Failure(slow, FailureKind.TIMEOUT, f"the job did not end within {self.limit_s:.0f} s"))

    def _request_stop(self, ranks: Processes, history: History, stop: StoppedBySignal) -> str:
        """Forward the signal to the ranks and wait for their checkpoint, or until a second signal.

        Returns: the stop message to report.
        """
        ranks.signal(stop.number)
        started = time.monotonic()
        while ranks.are_running():
            left_s = started + (self.checkpoint_s if history.stop_confirmed else self.confirm_stop_s) - time.monotonic()
            if left_s <= 0:
                break
            try:
                _wait(ranks, history, left_s)
            except StoppedBySignal as second:
                return str(second)
        messages = [report.message for report in history.reports() if report.kind is FailureKind.STOPPED]
        return messages[0] if messages else str(stop)

    def _wait_for_others(self, ranks: Processes, history: History) -> None:
        """Give the other ranks time to end and write their logs after the first failure."""
        deadline = time.monotonic() + self.grace_s
        while (left_s := deadline - time.monotonic()) > 0 and ranks.are_running():
            refused = [report.rank for report in history.reports() if report.kind is FailureKind.REFUSED]
            if any(ranks.codes()[rank] is not None for rank in refused):
                return  # a REFUSED failure is always a first cause, and it is already in the log
            _wait(ranks, history, left_s)


def _with_log_end(result: Result, log_dir: Path) -> Result:
    """Add the last lines of a rank's log to the failure of a rank that ended without a report."""
    failure = result.failure
    if failure is None or failure.kind not in (FailureKind.SIGNAL, FailureKind.EXIT) or failure.traceback:
        return result
    try:
        with (log_dir / f"rank_{failure.rank}.log").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_END_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-_LOG_END_LINES:]
    except OSError:  # rank 0 writes to the terminal
        return result
    return replace(result, failure=replace(failure, log_end="\n".join(lines)))


def _start(job: Job, lifeline: int, ranks: Processes) -> None:
    spec = json.dumps({"target": job.target, "config": str(job.config), "log_dir": str(job.log_dir)})
    command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), spec]
    with ExitStack() as stack:
        listener = stack.enter_context(listen())
        for rank in range(job.world_size):
            # Only the first rank writes to the terminal.
            log = job.log_dir / f"rank_{rank}.log"
            output = stack.enter_context(new_file(log).open("wb")) if rank > 0 else None
            inherited = (lifeline, *job.inherited, *([listener.fileno()] if rank == 0 else []))
            environment = _environment(job, rank, listener, lifeline)
            ranks.start(command, environment, output=output, inherited=inherited)


def _wait(ranks: Processes, history: History, timeout_s: float) -> None:
    """Wait for events, at most `timeout_s` seconds or a second, and add them to `history`.

    Raises: StoppedBySignal: this process received a stop signal.
    """
    stop = None
    for event in ranks.wait(timeout_s):
        if event.kind is EventKind.STOP:
            stop = stop or StoppedBySignal(event.message["number"])
            continue
        history.add(event)
        if event.message.get("kind") == "stall":
            history.stalls.add(event.rank, event.message, ranks.pids())
    if stop is not None:
        raise stop


def _environment(job: Job, rank: int, listener: socket.socket, lifeline: int) -> dict[str, str]:
    environment = loopback_environment() | os.environ
    if job.threads:
        environment.setdefault("OMP_NUM_THREADS", str(job.threads))
    if "SLURM_NTASKS" in environment:
        environment["SLURM_JOB_NAME"] = "interactive"  # so that Lightning does not treat this process as a SLURM task
    return environment | {
        **job.environment,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        **rendezvous_environment(listener, rank),
        "LIGHTNING_CP_LIFELINE": str(lifeline),
    }


@contextmanager
def _stop_pipe() -> Iterator[int]:
    """Write the number of each stop signal into a pipe inside the context, and restore the old handlers afterwards.

    A handler that raised could lose the signal: Python ignores exceptions in some callbacks, for instance after a fork.

    Yields: the reading end of the pipe.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def stop(number: int, _frame: FrameType | None) -> None:
        with suppress(BlockingIOError):  # the pipe is full of signals
            os.write(writer, bytes([number]))

    before: dict[signal.Signals, Any] = {}
    try:
        with suppress(ValueError):  # not the main thread, where Python cannot set signal handlers
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
                before[number] = signal.signal(number, stop)
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)
        os.close(reader)
