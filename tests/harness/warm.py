"""Start programs in processes that have imported torch, lightning and diffusers already: see `warm_server.py`.

`Popen` and `run` replace those of `subprocess` for commands that begin with `sys.executable`. The process is a child of
this one, and has the given arguments, environment, folder and streams. The ranks that `LocalLauncher` starts in it are
its children. Other modules are already imported than in a new interpreter, so tests of imports, and one test of each
recipe, use `subprocess`.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.harness.warm_server import child_was_created, popen_arguments

ROOT = Path(__file__).parents[2]
KEPT: set[int] = set()
"""Ids of child processes that are kept between tests: the server, and the workers of the pool."""
_BOOT = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.harness.warm_server import main; main()"
_PR_SET_CHILD_SUBREAPER = 36
_READ_LATE = (  # variables that no preloaded package reads while it is imported; parts of their names
    *("PYTHONPATH", "OMP_NUM_THREADS", "TMPDIR", "PATH", "RANK", "WORLD_SIZE", "MASTER_", "SLURM", "GLOO_", "NCCL_"),
    *("TORCHELASTIC_", "PYTEST_", "TORCHINDUCTOR_", "TRITON_", "HYDRA_"),
)


# Otherwise the import of diffusers in the server would take the GPUs from its forks.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


class Popen(subprocess.Popen[str]):
    """Start a Python program like `subprocess.Popen`, forked from the warm server if the system supports it."""

    def _execute_child(self, *args: Any) -> None:
        given = popen_arguments(self, args)
        if sys.platform != "linux":
            super()._execute_child(*args)  # type: ignore[misc]
            return
        python, *command = map(str, given["args"])
        assert python == sys.executable, f"not a program of this Python: {given['args']}"
        environment = dict(os.environ if given["env"] is None else given["env"])
        request = {
            "argv": command,
            "env": environment,
            "cwd": str(given["cwd"] or os.getcwd()),
            "start_new_session": given["start_new_session"],
        }
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        self.pid = _server().start(request, [number if fd == -1 else fd for number, fd in enumerate(streams)])
        child_was_created(self, given)


def run(command: list[Any], *, timeout: float, **settings: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run(command, capture_output=True, text=True, timeout=timeout)`, warm."""
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def run_ranks(
    count: int, command: list[Any], *, timeout: float, env: dict[str, str], cwd: Path
) -> subprocess.CompletedProcess[str]:
    """Run a program in `count` warm processes at the same time, with the variables that torchrun sets.

    Returns: the output of all, in rank order, and the first exit code that is not 0.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = {**env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2 * count)]
        processes = []
        for rank in range(count):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
            stdout, stderr = files[rank], files[count + rank]
            processes.append(Popen(command, env={**given, **ranks}, cwd=cwd, stdout=stdout, stderr=stderr))
            stack.callback(processes[-1].kill)
        deadline = time.monotonic() + timeout
        codes = [process.wait(deadline - time.monotonic()) for process in processes]
        for file in files:
            file.seek(0)
        outputs = [file.read() for file in files]
    code = next((code for code in codes if code), 0)
    return subprocess.CompletedProcess(command, code, "".join(outputs[:count]), "".join(outputs[count:]))


class _Server:
    """The process that forks."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.environment = dict(os.environ)  # one thread per library: a process with threads must not fork
        self.environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(["", str(ROOT)])],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        KEPT.add(self._process.pid)

    def start(self, request: dict[str, Any], streams: list[int]) -> int:
        """Returns: the id of a new child of this process."""
        changed = {name for name, _ in request["env"].items() ^ self.environment.items()}
        unknown = [name for name in changed if not any(part in name for part in _READ_LATE) and "_THREADS" not in name]
        assert not unknown, f"{unknown} may be read by an import: start this process cold"
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # adopt the process that the server forks
        try:
            socket.send_fds(self._connection, [json.dumps(request).encode()], streams)
            answer = self._connection.recv(32)
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        assert answer, "the warm server has ended; what it wrote to stderr says why"
        return int(answer)

    def close(self) -> None:
        self._connection.close()
        self._process.wait()
        KEPT.remove(self._process.pid)


_started: list[_Server] = []


def _server() -> _Server:
    if not _started:
        _started.append(_Server())
        atexit.register(close)
    return _started[0]


def environment() -> dict[str, str]:
    """Return the environment in which the server has imported its packages, for programs of the repository."""
    return {**_server().environment, "PYTHONPATH": str(ROOT)}


def close() -> None:
    """End the server, if there is one."""
    while _started:
        _started.pop().close()
