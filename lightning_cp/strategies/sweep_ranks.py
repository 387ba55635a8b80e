"""Start the ranks of one job of a Hydra multirun, and end them before the next job of the same process.

Lightning starts ranks with the command line of this process. In a multirun, each of them would run a sweep of its own.
Here a rank gets the overrides and the folder of the job that runs now. This process is rank 0 of each job.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lightning_cp.launch.stall import leave_process_group

# Variables that the launch of ranks sets in this process; each job starts with the values from before.
_VARIABLES = (
    *("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
)
_ENDS_S, _ENDS_AFTER_FAILURE_S = 30.0, 2.0  # ranks may end by themselves, once the next job has begun
_TERMINATES_S = 2.0  # between SIGTERM and SIGKILL
_NOTICES_S = 5.0  # rank 0 may notice itself that another rank has failed; the sweep then continues
_TICK_S = 0.5

_log = logging.getLogger("lightning.fabric.strategies.context_parallel")


def _job() -> Any | None:
    """Return Hydra's settings of this job, if this process runs one: it has imported Hydra then."""
    module = sys.modules.get("hydra.core.hydra_config")
    return module.HydraConfig.get() if module is not None and module.HydraConfig.initialized() else None


def multirun_job() -> Any | None:
    """Return Hydra's settings of this job if it is part of a multirun, otherwise None."""
    job = _job()
    return job if job is not None and job.mode.name == "MULTIRUN" else None


def job_overrides() -> list[str]:
    """Return the overrides of this Hydra job; empty without Hydra."""
    job = _job()
    return [] if job is None else list(job.overrides.task)


def _config() -> object:
    """Return Hydra's configuration object of this job: another job has another one."""
    return sys.modules["hydra.core.hydra_config"].HydraConfig.instance().cfg


def rank_command(job: Any, local_rank: int) -> list[str]:
    """Return the command that runs one job of a multirun as a single run.

    Args: job: `multirun_job()`. local_rank: number of the rank on this machine.
    Raises: ValueError: this process runs no script and no module.
    """
    spec = sys.modules["__main__"].__spec__
    script = os.path.join(job.runtime.cwd, sys.argv[0])
    if spec is None and not os.path.isfile(script):
        raise ValueError(
            f"cannot start the ranks of a Hydra multirun from {sys.argv[0]!r}, which is no file: run a script or "
            "`python -m module`, or set start_method='spawn' or 'fork'"
        )
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags = {"--config-path": "-cp", "--config-name": "-cn", "--config-dir": "-cd"}
    for flag, short in flags.items():
        parser.add_argument(flag, short, dest=flag)
    hydra_flags, _ = parser.parse_known_args(sys.argv[1:])
    grammar = sys.modules["hydra.core.override_parser.types"]
    single = grammar.Quote.single
    settings = {
        "run.dir": job.runtime.output_dir,
        "sweep.dir": job.sweep.dir,
        "sweep.subdir": job.sweep.subdir,
        "job.name": f"{job.job.name}_rank_{local_rank}",  # also names its log file
        "job.id": str(job.job.id),
    }
    return [
        sys.executable,
        *([script] if spec is None else ["-m", spec.name]),
        *(word for flag, value in vars(hydra_flags).items() if value is not None for word in (flag, value)),
        *job.overrides.hydra,
        *job.overrides.task,
        *(f"hydra.{name}={grammar.QuotedString(value, single).with_quotes()}" for name, value in settings.items()),
        f"hydra.job.num={job.job.num}",
        "hydra.mode=RUN",
        "hydra.output_subdir=null",
    ]


@dataclass(eq=False)
class SweepRanks:
    """The ranks of one job of a multirun that this process has started. It is rank 0 itself.

    Attributes:
        config: Hydra's configuration object of the job.
        before: environment variables and threads of this process before the launch.
        processes: the other ranks, from rank 1.
        has_failed: True if the job has raised an error here.
    """

    config: object = field(default_factory=_config)
    before: tuple[dict[str, str | None], int] = field(
        default_factory=lambda: ({name: os.environ.get(name) for name in _VARIABLES}, torch.get_num_threads())
    )
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    has_failed: bool = False
    _ended: threading.Event = field(default_factory=threading.Event)

    def start(self, environment: Any, *, ranks: int, nodes: int) -> None:
        """Start ranks 1 to `ranks` - 1. Args: environment: Lightning's cluster environment.

        Raises: ValueError: several nodes, or see `rank_command`.
        """
        if nodes > 1:
            raise ValueError(
                f"num_nodes={nodes} must be 1 in a Hydra multirun that starts its own ranks, because each node would "
                "run its own sweep: start one job at a time, or submit the jobs with hydra/launcher=submitit_slurm"
            )
        job = multirun_job()
        assert job is not None, "checked by the caller"
        commands = [rank_command(job, rank) for rank in range(1, ranks)]
        os.environ.update(
            MASTER_ADDR=environment.main_address,
            MASTER_PORT=str(environment.main_port),
            NODE_RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE=str(ranks),
        )
        _current[:] = [self]
        for rank, command in enumerate(commands, 1):
            variables = {**os.environ, "LOCAL_RANK": str(rank)}
            self.processes.append(subprocess.Popen(command, env=variables, cwd=job.runtime.cwd))
        threading.Thread(target=self._watch, name="lightning_cp_sweep_ranks", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """True once Hydra has ended the job."""
        return _config() is not self.config

    def signal(self, number: int) -> None:
        """Send a signal to the other ranks."""
        for process in self.processes:
            process.send_signal(number)

    def end(self) -> None:
        """Wait until the other ranks have ended, or end them; then leave the process group and restore the environment.

        Ranks that failed after this rank's job are reported.
        """
        self._ended.set()
        unfinished = self._running(within_s=_ENDS_AFTER_FAILURE_S if self.has_failed else _ENDS_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.signal(number)
            self._running(within_s=_TERMINATES_S)
        if not self.has_failed:
            for rank, process in enumerate(self.processes, 1):
                if process.returncode:
                    how = "did not end with its job and was ended" if process in unfinished else "failed"
                    _log.warning(f"rank {rank} of the previous job {how} (exit code {process.returncode})")
        if dist.is_available() and dist.is_initialized():
            leave_process_group()
        variables, threads = self.before
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        torch.set_num_threads(threads)

    def _running(self, *, within_s: float) -> Sequence[subprocess.Popen[bytes]]:
        """Return the processes that have not ended within some seconds."""
        until = time.monotonic() + within_s
        while (running := [one for one in self.processes if one.poll() is None]) and time.monotonic() < until:
            time.sleep(0.02)
        return running

    def _watch(self) -> None:
        """End all ranks if one fails and this rank does not notice it: it may hang in a collective.

        The sweep cannot continue then. In a single run, Lightning does the same.
        """
        while not self._ended.wait(_TICK_S) and not self.is_over:
            codes = [process.poll() for process in self.processes]
            if not any(codes):
                continue
            until = time.monotonic() + _NOTICES_S
            while time.monotonic() < until:
                if self._ended.wait(_TICK_S) or self.is_over:
                    return
            rank = next(rank for rank, code in enumerate(codes, 1) if code)
            print(
                f"error: rank {rank} has ended with exit code {codes[rank - 1]}, and rank 0 has not noticed it: the "
                "sweep ends here",
                file=sys.stderr,
                flush=True,
            )
            self.signal(signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


_current: list[SweepRanks] = []  # of the last job of this process


def end_previous_job() -> None:
    """End the ranks of an earlier job of the multirun, and undo what its launch has changed in this process."""
    if _current and _current[0].is_over:
        _current.pop().end()


class StartsScripts:
    """Base of the launchers of scripts: ranks listen on the loopback interface only; multiruns use `SweepRanks`."""

    _local_ranks: Any
    _sweep_ranks: SweepRanks | None = None

    def __init__(self, *args: Any, local_ranks: Any) -> None:
        super().__init__(*args)
        self._local_ranks = local_ranks

    def launch(self, function: Any, *args: Any, **settings: Any) -> Any:
        """Start the ranks if Lightning's launcher would, and run a function."""
        try:
            return super().launch(function, *args, **settings)  # type: ignore[misc]
        except BaseException:
            if self._sweep_ranks is not None:
                self._sweep_ranks.has_failed = True
            raise

    def kill(self, signum: int) -> None:
        """Send a signal to the other ranks."""
        if self._sweep_ranks is not None:
            self._sweep_ranks.signal(signum)
        else:
            super().kill(signum)  # type: ignore[misc]

    def _call_children_scripts(self) -> None:
        launcher: Any = self
        environment, nodes = launcher.cluster_environment, launcher.num_nodes
        if multirun_job() is not None:
            self._sweep_ranks = SweepRanks()  # before the environment changes
        with self._local_ranks.for_scripts(environment, num_nodes=nodes):
            if self._sweep_ranks is None:
                super()._call_children_scripts()  # type: ignore[misc]
            else:
                self._sweep_ranks.start(environment, ranks=launcher.num_processes, nodes=nodes)
