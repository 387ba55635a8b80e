"""Starts the ranks of a job as processes of this machine, watches them, and takes them all down when one fails."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from typing_extensions import override

from lightning_cp.launch.job import Failure, FailureKind, Job, Launcher, Result
from lightning_cp.launch.rendezvous import listen, loopback_environment, rendezvous_environment
from lightning_cp.launch.scratch import temporary_folder
from lightning_cp.launch.stopping import ASKING, HEARD

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from lightning_cp.launch.rank import main; main(sys.argv[2])"
)
_POLL_S = 0.05
_HEARD_FILE = "heard"
# Signals that come from outside, or from lack of memory: what other ranks say after one is its effect.
_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS, signal.SIGINT, signal.SIGHUP})


class StoppedBySignal(BaseException):
    """The launcher's own process was told to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number} ({signal.Signals(number).name})")
        self.number = number


@dataclass(frozen=True)
class LocalLauncher(Launcher):
    """One process a rank, each in a session of its own, on a free port of the loopback.

    Args:
        settle_s: after the first failure, how long others may take to end: a rank that dies by a signal may still be
            writing its core file when its peers have already told of the lost connection.
        terminate_s: how long ranks may take to end on SIGTERM before SIGKILL.
        hear_s: when this process is asked to stop (SIGTERM, SIGUSR1), how long until a rank must have heard of it.
        checkpoint_s: how long ranks may then take to write a checkpoint; a second signal ends them at once.
        limit_s: how long a job may take.
    """

    settle_s: float = 2.0
    terminate_s: float = 2.0
    hear_s: float = 10.0
    checkpoint_s: float = 60.0
    limit_s: float = math.inf

    @override
    def launch(self, job: Job) -> Result:
        job.log_dir.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            reports = stack.enter_context(temporary_folder())
            lifeline, held_end = os.pipe()
            stack.callback(os.close, held_end)
            stack.callback(os.close, lifeline)
            ranks: list[subprocess.Popen[bytes]] = []
            try:
                with _signals_raise() as ignore_signals:
                    try:
                        self._start(job, reports, lifeline, ranks)
                        return self._watch(ranks, reports)
                    except StoppedBySignal as stop:
                        message = self._ask_to_stop(ranks, reports, stop) if stop.number in ASKING else str(stop)
                        return Result(Failure(-1, FailureKind.STOPPED, message, exit_code=128 + stop.number))
                    finally:
                        ignore_signals()  # the end takes no longer than `terminate_s`
                        self._end_all(ranks)
            except StoppedBySignal as stop:  # again, while ranks were writing their checkpoint
                return Result(Failure(-1, FailureKind.STOPPED, str(stop), exit_code=128 + stop.number))

    def _start(self, job: Job, reports: Path, lifeline: int, ranks: list[subprocess.Popen[bytes]]) -> None:
        spec = reports / "job.json"
        fields = {"target": job.target, "config": str(job.config), "reports": str(reports)}
        spec.write_text(json.dumps({**fields, "log_dir": str(job.log_dir)}))
        command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(spec)]
        with ExitStack() as stack:
            listener = stack.enter_context(listen())
            for rank in range(job.world_size):
                output = None  # the first rank speaks for all
                if rank > 0:
                    output = stack.enter_context((job.log_dir / f"rank_{rank}.log").open("wb"))
                ranks.append(
                    subprocess.Popen(
                        command,
                        env=_environment(job, rank, listener, lifeline) | {HEARD: str(reports / _HEARD_FILE)},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        pass_fds=(lifeline, *job.inherited, *([listener.fileno()] if rank == 0 else [])),
                        start_new_session=True,
                    )
                )

    def _watch(self, ranks: list[subprocess.Popen[bytes]], reports: Path) -> Result:
        deadline = time.monotonic() + self.limit_s
        while True:
            codes = [process.poll() for process in ranks]
            if time.monotonic() > deadline:
                slow = next(rank for rank, code in enumerate(codes) if code is None)
                message = f"not done after {self.limit_s:.0f} s"
                return Result(Failure(slow, FailureKind.EXIT, message))
            if any(codes):
                self._settle(ranks, reports)
                return Result(_first_cause([process.poll() for process in ranks], reports))
            if all(code == 0 for code in codes):
                return Result()
            time.sleep(_POLL_S)

    def _ask_to_stop(self, ranks: list[subprocess.Popen[bytes]], reports: Path, stop: StoppedBySignal) -> str:
        """Pass the signal on, and wait until ranks have written what they have. Returns: what they say."""
        for process in ranks:
            if process.poll() is None:
                process.send_signal(stop.number)
        started, heard = time.monotonic(), reports / _HEARD_FILE
        while any(process.poll() is None for process in ranks):
            if time.monotonic() - started > (self.checkpoint_s if heard.exists() else self.hear_s):
                break
            time.sleep(_POLL_S)
        said = [report.message for report in _reports(reports) if report.kind is FailureKind.STOPPED]
        return said[0] if said else str(stop)

    def _settle(self, ranks: list[subprocess.Popen[bytes]], reports: Path) -> None:
        deadline = time.monotonic() + self.settle_s
        while time.monotonic() < deadline and any(process.poll() is None for process in ranks):
            if any(report.kind is FailureKind.REFUSED for report in _reports(reports)):
                return  # no consequence of anything
            time.sleep(_POLL_S)

    def _end_all(self, ranks: list[subprocess.Popen[bytes]]) -> None:
        for process in ranks:
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + self.terminate_s
        for process in ranks:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal_group(process, signal.SIGKILL)
        for process in ranks:
            _signal_group(process, signal.SIGKILL)  # what the rank itself started, and left behind
            process.wait()


def _environment(job: Job, rank: int, listener: socket.socket, lifeline: int) -> dict[str, str]:
    environment = loopback_environment() | os.environ
    if job.threads:
        environment.setdefault("OMP_NUM_THREADS", str(job.threads))
    if "SLURM_NTASKS" in environment:
        environment["SLURM_JOB_NAME"] = "interactive"  # tells Lightning that SLURM did not start this process
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


def _first_cause(codes: list[int | None], reports: Path) -> Failure:
    """The failure that the others followed from: a signal from outside, else the first report, else an exit code."""
    killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0 and -code in _OUTSIDE]
    if killed:
        return _signal_failure(killed[0], -(codes[killed[0]] or 0))
    written = _reports(reports)
    if written:
        return written[0]
    rank = next(rank for rank, code in enumerate(codes) if code)
    code = codes[rank] or 0
    if code < 0:
        return _signal_failure(rank, -code)
    return Failure(rank, FailureKind.EXIT, f"rank {rank} ended with exit code {code}", exit_code=code)


def _reports(folder: Path) -> list[Failure]:
    """What ranks left, the first first."""
    written = sorted(folder.glob("rank_*.json"), key=lambda path: path.stat().st_mtime_ns)
    return [Failure.read(path) for path in written]


def _signal_failure(rank: int, number: int) -> Failure:
    message = f"rank {rank} was ended by signal {number} ({signal.Signals(number).name})"
    return Failure(rank, FailureKind.SIGNAL, message, exit_code=128 + number)


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return  # the group is empty


@contextmanager
def _signals_raise() -> Iterator[Callable[[], None]]:
    """Inside, signals that ask this process to end raise `StoppedBySignal`, until what it gives is called; handlers are
    put back after."""
    heeds = True

    def stop(number: int, _frame: FrameType | None) -> None:
        if heeds:
            raise StoppedBySignal(number)

    def ignore() -> None:
        nonlocal heeds
        heeds = False

    wanted = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
    try:
        before = {number: signal.signal(number, stop) for number in wanted}
    except ValueError:  # not the main thread: whoever owns it handles its signals
        yield ignore
        return
    try:
        yield ignore
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
