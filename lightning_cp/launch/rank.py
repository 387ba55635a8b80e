"""Run one rank, started by our launcher or by torchrun or SLURM: call the target, report a failure."""

import atexit
import faulthandler
import gc
import importlib
import importlib.util
import io
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from typing_extensions import override

from lightning_cp.compat.versions import missing_package
from lightning_cp.files import new_file
from lightning_cp.launch import channel
from lightning_cp.launch.cause import lost_connection
from lightning_cp.launch.channel import Stopped, end_with_launcher, end_with_parent
from lightning_cp.launch.job import Failure, FailureKind, Job, Launcher, Result
from lightning_cp.launch.machine import free_port
from lightning_cp.launch.rendezvous import take_listener

Target = Callable[[Path], None]
PACKAGE_DIR = Path(__file__).resolve().parents[1]
_OWN_DIRS = {PACKAGE_DIR, (PACKAGE_DIR / "recipes").resolve()}  # in a clone, recipes/ stands beside the package
_ports: list[int] = []  # ports for this process's later jobs; the first job uses the launcher's MASTER_PORT


def load_target(target: str) -> Target:
    """Import the function named by `package.module:function` or `/path/to/file.py:function`."""
    location, _, name = target.rpartition(":")
    module = _load_file(Path(location)) if location.endswith(".py") else importlib.import_module(location)
    function: Target = getattr(module, name)
    return function


def target_of(function: Target) -> str:
    """Return the name by which `load_target` finds a function, also one of the program that runs."""
    main = sys.modules["__main__"].__file__ if function.__module__ == "__main__" else None
    return f"{os.path.abspath(main) if main else function.__module__}:{function.__name__}"


def run_target(target: str, config: Path, *, more_to_come: bool = False) -> int | None:
    """Call the target with the path of its settings, then destroy the process group if there is one.

    After an error the group is not destroyed, because other ranks may never join in; it ends with the process.

    Args:
        more_to_come: True if these processes may run another job.
    Returns: with `more_to_come`, the MASTER_PORT of the next job: this group's store still holds old keys. Otherwise
        None.
    """
    load_target(target)(config)
    channel.send({"kind": "returned"})  # must be sent before other ranks can notice that this rank leaves the group
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    ports = [free_port()]
    if more_to_come:
        torch.distributed.broadcast_object_list(ports, src=0)
    from lightning_cp.launch.stall import leave_process_group

    leave_process_group()
    return ports[0] if more_to_come else None


def failure_of(error: BaseException, rank: int) -> Failure:
    """Describe an exception: in one line if its message is meant for the user, otherwise with its traceback."""
    cause = _root(error)
    if isinstance(cause, SystemExit) and isinstance(cause.code, int):
        return Failure(rank, FailureKind.EXIT, f"rank {rank} ended with exit code {cause.code}", exit_code=cause.code)
    message, name, text = str(cause), type(cause).__name__, "".join(traceback.format_exception(cause))
    if isinstance(cause, Stopped):
        return Failure(rank, FailureKind.STOPPED, message, text, exit_code=cause.exit_code)
    if (missing := missing_package(cause, "this run")) is not None:
        return Failure(rank, FailureKind.REFUSED, missing, text)
    if was_raised_for_the_user(cause):
        return Failure(rank, FailureKind.REFUSED, " ".join(message.split()) or name, text)
    return Failure(rank, FailureKind.RAISED, f"{name}: {message}", text)


def was_raised_for_the_user(error: BaseException) -> bool:
    """Return True if the message needs no traceback.

    That holds for this package's error classes, Lightning's MisconfigurationException, and ValueError, TypeError,
    OSError (a full disk) or FileNotFoundError from a `raise` statement in this package.
    """
    kind = type(error)
    if kind.__module__.startswith("lightning_cp.") or kind.__name__ == "MisconfigurationException":
        return True
    frames = traceback.extract_tb(error.__traceback__)
    is_in_package = bool(frames) and not _OWN_DIRS.isdisjoint(Path(frames[-1].filename).resolve().parents)
    is_raise = is_in_package and (frames[-1].line or "raise").startswith("raise")  # not a bug in that line
    return is_raise and kind in (ValueError, TypeError, OSError, FileNotFoundError)


def main(spec: str) -> None:
    """Run a rank that `LocalLauncher` started. Args: spec: `target`, `config` and `log_dir` as JSON."""
    complete: list[bool] = []
    atexit.register(_end_process, complete)  # first, so that it runs last
    settings = json.loads(spec)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # logs keep their order, and their end if the rank is killed
    with suppress(ValueError, OSError, AttributeError):  # stderr was replaced by something that is not a file
        faulthandler.enable()  # a rank that crashes writes its Python stack to its log
    channel.open_channel(os.environ)
    end_with_launcher(int(os.environ.pop("LIGHTNING_CP_LIFELINE")))
    take_listener(os.environ)
    rank = int(os.environ["RANK"])
    try:
        run_target(settings["target"], Path(settings["config"]))
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            channel.send({"kind": "exited"})  # sent instead of "returned": a failure, unless all ranks exit this way
        else:
            _report_and_exit(failure_of(error, rank), Path(settings["log_dir"]))
    complete.append(True)


def _end_process(complete: list[bool]) -> None:
    """End this process after Python's exit handlers, without the destructors of C++ libraries.

    These destroy global objects that threads of gloo or OpenMP may still use. That could abort a rank after its work is
    complete. Files that Python would have closed are flushed here.

    Args: complete: empty if `main` did not reach its end; Python then ends the process, with its exit code.
    """
    if not complete:
        return
    logging.shutdown()
    gc.unfreeze()  # `gc.get_objects` leaves out what a program has frozen, as training loops do
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):
            with suppress(OSError, ValueError):  # the disk is full, or it was closed
                thing.flush()
    os._exit(0)


def _report_and_exit(failure: Failure, log_dir: Path) -> NoReturn:
    """Report a failure and end this process without waiting for other ranks, which may be waiting for this rank."""
    try:
        channel.send({"kind": "failure", "failure": failure.to_fields()})
        for write in (lambda: write_traceback(failure, log_dir), sys.stdout.flush, sys.stderr.flush):
            with suppress(OSError, ValueError):  # the disk is full, or the stream was closed
                write()
    finally:
        os._exit(failure.exit_code)


def write_traceback(failure: Failure, log_dir: Path) -> Path:
    """Write the traceback of a failure to a file in `log_dir`. Returns: its path."""
    log = log_dir / f"rank_{failure.rank}.traceback.txt"
    log_dir.mkdir(parents=True, exist_ok=True)
    new_file(log).write_text(failure.traceback, encoding="utf-8")
    return log


def _load_file(path: Path) -> ModuleType:
    module_spec = importlib.util.spec_from_file_location(f"_lightning_cp_target_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise ImportError(f"{path} is not a Python file (.py)")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # so that its classes and functions can be pickled for DataLoader workers
    module_spec.loader.exec_module(module)
    return module


def _root(error: BaseException) -> BaseException:
    """Return the original exception of a constructor, which Hydra wraps in InstantiationException."""
    while type(error).__name__ == "InstantiationException" and error.__cause__ is not None:
        error = error.__cause__
    return error


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
