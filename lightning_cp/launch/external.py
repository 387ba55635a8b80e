"""Run jobs in ranks that torchrun, SLURM or another launcher has started; this process is one of them."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from typing_extensions import override

from lightning_cp.launch.cause import lost_connection
from lightning_cp.launch.job import FailureKind, Job, Launcher, Result
from lightning_cp.launch.lifeline import end_with_parent
from lightning_cp.launch.rank import failure_of, run_target, write_traceback


@dataclass(frozen=True)
class LauncherEnv:
    """The launcher, rank and world size of a process started by an external launcher."""

    launcher: str
    rank: int
    world_size: int
    ranks_per_node: int


def launcher_env(environ: Mapping[str, str]) -> LauncherEnv | None:
    """Read rank and world size from the launcher's environment variables; None if no launcher started this process."""
    rank, size = read_count(environ, "RANK"), read_count(environ, "WORLD_SIZE")
    if rank is not None and size is not None and "LOCAL_RANK" in environ:
        return LauncherEnv("torchrun", rank, size, read_count(environ, "LOCAL_WORLD_SIZE") or size)
    interactive = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    rank, tasks = read_count(environ, "SLURM_PROCID"), read_count(environ, "SLURM_NTASKS") or 1
    if rank is not None and tasks > 1 and not interactive:
        return LauncherEnv("SLURM", rank, tasks, tasks // (read_count(environ, "SLURM_NNODES") or 1))
    return None


def is_first(env: LauncherEnv | None) -> bool:
    """Return True if this process writes files and prints: it is rank 0, or it starts the ranks itself."""
    return env is None or env.rank == 0


def read_count(environ: Mapping[str, str], name: str) -> int | None:
    """Read an environment variable as a non-negative integer; None if it is missing or not one."""
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else None


@dataclass(frozen=True)
class ExternalLauncher(Launcher):
    """Run the job's target in this process, as its rank; the external launcher watches the processes."""

    env: LauncherEnv

    @override
    def launch(self, job: Job) -> Result:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()
        try:
            with _environment_restored():
                if _ports:
                    os.environ.update(MASTER_PORT=str(_ports[-1]), TORCHELASTIC_USE_AGENT_STORE="False")
                port = run_target(job.target, job.config, more_to_come=True)
            if port is not None:
                _ports.append(port)
        except Exception as error:
            failure = lost_connection(failure_of(error, self.env.rank))
            if failure.kind is FailureKind.RAISED and not is_first(self.env):  # often, all ranks raise the same error
                with suppress(OSError, ValueError):  # if it cannot be written, it is printed
                    failure = replace(failure, traceback=f"Its traceback: {write_traceback(failure, job.log_dir)}")
            return Result(failure)
        return Result()


_ports: list[int] = []  # ports for this process's later jobs; the first job uses the launcher's MASTER_PORT


@contextmanager
def _environment_restored() -> Iterator[None]:
    """Restore the environment variables and torch's thread count afterwards, for the next job in this process."""
    environment, torch = dict(os.environ), sys.modules.get("torch")
    threads = torch.get_num_threads() if torch is not None else None
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        if torch is not None:
            torch.set_num_threads(threads)
