"""Start Python programs in forks of a process that has already imported the slow packages.

    python -c "from tests.harness.warm_server import main; main()" DESCRIPTOR    (see `warm.py`, which starts it)

Importing torch, lightning and diffusers takes about 5 CPU seconds per process. This process imports them once, starts
no thread and no parallel region, and forks for every program, so a fork has no lock of another thread.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import inspect
import json
import logging
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.profiler",
    "lightning.fabric",
    "lightning.pytorch",
    "diffusers.models.transformers.transformer_flux",
    "diffusers.models.transformers.transformer_wan",
    "diffusers.pipelines.wan.pipeline_wan",
    "matplotlib.pyplot",
    "sklearn.datasets",
    "sklearn.linear_model",
    "rich.progress",
    "hydra.core.singleton",
    "hydra.core.hydra_config",
    "lightning_cp.pytorch",
    "lightning_cp.recipes.runs.recipe",
    "lightning_cp.recipes.training.fit",
    "lightning_cp.recipes.sampling.show",
    "lightning_cp.launch.rank",
)


def main() -> None:
    """Import, then fork for each request; in a fork, run the program and end as the interpreter ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: also when the test run is killed
    standard_path = [entry for entry in sys.path if entry not in json.loads(sys.argv[2])]
    for name in PRELOADED:
        importlib.import_module(name)
    state = _State.now()
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads after the imports: a fork could inherit a lock of theirs"
    _serve(socket.socket(fileno=int(sys.argv[1])), standard_path)
    _fork_ranks(state)
    _run_and_exit(lambda: _run(sys.argv))


def _serve(connection: socket.socket, standard_path: list[str]) -> None:
    """Answer each request with the process id of a fork. It returns in the forks only."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            os._exit(0)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:  # its end gives the program to the client, the next process above that adopts orphans
            between, child = os.getpid(), os.fork()
            if child == 0:
                connection.close()
                while os.getppid() == between:
                    time.sleep(1e-3)
                _become(json.loads(message), descriptors, standard_path)
                return
            os.write(writer, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        connection.send(os.read(reader, 32))
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)


def _become(request: Mapping[str, Any], descriptors: list[int], standard_path: list[str]) -> None:
    """Take over the program's arguments, environment, folder and streams."""
    _use_streams(dict(enumerate(descriptors)), request["start_new_session"], keep=())
    os.chdir(request["cwd"])
    sys.argv = request["argv"]
    _use_environment(request["env"])
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    first = {"-c": "", "-m": os.getcwd()}.get(sys.argv[0], str(Path(sys.argv[0]).resolve().parent))
    sys.path[:] = [first, *map(os.path.abspath, given), *standard_path]


def _run(command: list[str]) -> None:
    """Do what `python *command` does: `-c code`, `-m module` or a script, and its arguments."""
    kind, *rest = command
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        program = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(program))
    elif kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(kind, run_name="__main__")


def _use_streams(streams: Mapping[int, int], start_new_session: bool, keep: tuple[int, ...]) -> None:
    """Replace standard streams and close all other descriptors but `keep`, as `subprocess` does."""
    if start_new_session:
        os.setsid()
    for number, descriptor in streams.items():
        os.dup2(descriptor, number)
    last = 2
    for descriptor in (*sorted(keep), os.sysconf("SC_OPEN_MAX")):
        os.closerange(last + 1, descriptor)
        last = descriptor


def _use_environment(environment: Mapping[str, str]) -> None:
    """Set the environment, and the state that imported packages derive from it or from random numbers."""
    import numpy as np
    import torch

    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    random.seed()
    np.random.seed()
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))


@dataclass(frozen=True)
class _State:
    """State that a launcher changes in its process and a new process does not have."""

    singletons: dict[Any, Any]
    resolvers: dict[str, Callable[..., Any]]
    handlers: list[logging.Handler]
    level: int

    @classmethod
    def now(cls) -> _State:
        from hydra.core.singleton import Singleton
        from omegaconf.basecontainer import BaseContainer

        root = logging.getLogger()
        return cls(dict(Singleton._instances), dict(BaseContainer._resolvers), list(root.handlers), root.level)

    def restore(self) -> None:
        from hydra.core.singleton import Singleton
        from omegaconf.basecontainer import BaseContainer

        Singleton._instances = dict(self.singletons)
        BaseContainer._resolvers = dict(self.resolvers)
        logging.getLogger().handlers[:] = self.handlers
        logging.getLogger().setLevel(self.level)
        logging.disable(logging.NOTSET)
        atexit._clear()
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):  # a new program starts without the handlers of its parent
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _fork_ranks(state: _State) -> None:
    """Make `LocalLauncher` fork its ranks from this process, which has no threads."""
    from lightning_cp.launch import processes

    class Forked(subprocess.Popen[Any]):
        def _execute_child(self, *args: Any) -> None:
            given = popen_arguments(self, args)
            assert given["args"][:2] == [sys.executable, "-c"], f"not how a rank is started: {given['args']}"
            sys.stdout.flush()
            sys.stderr.flush()
            self.pid = os.fork()
            if self.pid == 0:
                _run_rank(given, state)
            child_was_created(self, given)

    processes.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": Forked})  # type: ignore[attr-defined]


def popen_arguments(process: subprocess.Popen[Any], given: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments of `Popen._execute_child`, by name: their order may change."""
    method = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    return dict(inspect.signature(method).bind(process, *given).arguments)


def child_was_created(process: subprocess.Popen[Any], given: Mapping[str, Any]) -> None:
    """Do what `_execute_child` does in the end: close the child's ends of the pipes."""
    process._child_created = True  # type: ignore[attr-defined]
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(given[end] for end in ends))  # type: ignore[attr-defined]


def _run_rank(given: Mapping[str, Any], state: _State) -> NoReturn:
    """Run a rank's program in this fork, and end it: it must not return into the launcher's frames."""

    def run() -> None:
        state.restore()
        given_streams = {0: given["p2cread"], 1: given["c2pwrite"], 2: given["errwrite"]}
        streams = {number: descriptor for number, descriptor in given_streams.items() if descriptor != -1}
        _use_streams(streams, given["start_new_session"], keep=tuple(given["pass_fds"]))
        _use_environment(given["env"])
        _run(given["args"][1:])

    _run_and_exit(run)


def _run_and_exit(program: Callable[[], None]) -> NoReturn:
    """Run a program and end this process as the interpreter does, but without freeing every imported object.

    That would take half a second: it touches all memory that the fork shares with its parent.
    """
    code = 1
    try:
        program()
        code = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if code < 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)
