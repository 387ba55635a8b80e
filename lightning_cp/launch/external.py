"""Ranks that torchrun, SLURM or another launcher has started: this process is one of them."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from typing_extensions import override

from lightning_cp.launch.job import Job, Launcher, Result
from lightning_cp.launch.rank import failure_of, run_target


@dataclass(frozen=True)
class LauncherEnv:
    """Where this process stands in a world that others started."""

    launcher: str
    rank: int
    world_size: int
    ranks_per_node: int


def launcher_env(environ: Mapping[str, str]) -> LauncherEnv | None:
    """This process' place as its environment tells it, or None where no launcher started it."""
    rank, size = whole_number(environ, "RANK"), whole_number(environ, "WORLD_SIZE")
    if rank is not None and size is not None and "LOCAL_RANK" in environ:
        return LauncherEnv("torchrun", rank, size, whole_number(environ, "LOCAL_WORLD_SIZE") or size)
    interactive = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    rank, tasks = whole_number(environ, "SLURM_PROCID"), whole_number(environ, "SLURM_NTASKS") or 1
    if rank is not None and tasks > 1 and not interactive:
        return LauncherEnv("SLURM", rank, tasks, tasks // (whole_number(environ, "SLURM_NNODES") or 1))
    return None


def is_first(place: LauncherEnv | None) -> bool:
    """Whether this process writes and speaks: it starts the ranks, or is the first of them."""
    return place is None or place.rank == 0


def whole_number(environ: Mapping[str, str], name: str) -> int | None:
    """The variable as a number of 0 or more; None where it is none."""
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else None


@dataclass(frozen=True)
class ExternalLauncher(Launcher):
    """Runs the job's target here, as the rank that this process is; the launcher that started it watches it."""

    place: LauncherEnv

    @override
    def launch(self, job: Job) -> Result:
        try:
            with _surroundings_kept():
                if _ports:
                    os.environ.update(MASTER_PORT=str(_ports[-1]), TORCHELASTIC_USE_AGENT_STORE="False")
                port = run_target(job.target, job.config, more_to_come=True)
            if port is not None:
                _ports.append(port)
        except Exception as error:
            return Result(failure_of(error, self.place.rank))
        return Result()


_ports: list[int] = []  # on which the next job of this process meets; none yet: where the launcher said


@contextmanager
def _surroundings_kept() -> Iterator[None]:
    """The next job in this process finds the environment and the number of threads as this one did."""
    environment, torch = dict(os.environ), sys.modules.get("torch")
    threads = torch.get_num_threads() if torch is not None else None
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        if torch is not None:
            torch.set_num_threads(threads)
