"""Run ranks behind slow links: each in a network namespace of its own, all on one bridge (Linux, as root)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_cp.launch.job import Failure, FailureKind, Job, Launcher, Result

_PORT = 29500  # of rank 0's namespace, in which nothing else listens
_RANK = "import sys; from pathlib import Path; from lightning_cp.launch.rank import run_target; "
_RANK += "run_target(sys.argv[1], Path(sys.argv[2]))"


def check_links(link_mbit: Any) -> str:
    """Check the setting `link_mbit`. Returns: what is wrong; "" if nothing is."""
    if link_mbit is None:
        return ""
    if not isinstance(link_mbit, (int, float)) or not link_mbit > 0:
        return f"link_mbit={link_mbit} is not valid: must be null or a number of Mbit/s above 0"
    if os.name != "posix" or os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        return f"link_mbit={link_mbit} makes network namespaces: it needs Linux, root, and the programs ip and tc"
    return ""


@dataclass(frozen=True)
class SlowLinks(Launcher):
    """Launch each rank of a job in a network namespace of its own; their output is that of this process.

    Args:
        mbit: Mbit/s that a rank can send.
        limit_s: time limit of a job, in seconds.
    """

    mbit: float
    limit_s: float

    @override
    def launch(self, job: Job) -> Result:
        shared = {"WORLD_SIZE": f"{job.world_size}", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": f"{_PORT}"}
        shared |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": f"{job.threads}"}
        with _namespaces(job.world_size, self.mbit) as names:
            processes = [
                subprocess.Popen(
                    ["ip", "netns", "exec", name, sys.executable, "-c", _RANK, job.target, str(job.config)],
                    env={**os.environ, **shared, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
                )
                for rank, name in enumerate(names)
            ]
            try:
                return Result(self._failure(processes))
            finally:
                for process in processes:
                    process.kill()
                    process.wait()

    def _failure(self, processes: Sequence[subprocess.Popen[bytes]]) -> Failure | None:
        """Wait for all processes, or for the first failure."""
        deadline = time.monotonic() + self.limit_s
        while True:
            codes = [process.poll() for process in processes]
            for rank, code in enumerate(codes):
                if code:
                    text = f"rank {rank} behind a slow link ended with exit code {code}"
                    return Failure(rank, FailureKind.EXIT, text)
            if None not in codes:
                return None
            if time.monotonic() > deadline:
                return Failure(-1, FailureKind.TIMEOUT, f"the ranks behind slow links took more than {self.limit_s} s")
            time.sleep(0.1)


@contextmanager
def _namespaces(count: int, mbit: float) -> Iterator[list[str]]:
    """Make network namespaces, whose interfaces send at most `mbit` Mbit/s, for as long as the context lasts."""
    job = f"lcp{os.getpid()}"
    names = [f"{job}n{i}" for i in range(count)]
    try:
        _ip(f"link add {job} type bridge")
        _ip(f"link set {job} up")
        for number, name in enumerate(names):
            _ip(f"netns add {name}")
            _ip(f"link add {job}v{number} type veth peer name eth0 netns {name}")
            _ip(f"link set {job}v{number} master {job} up")
            _ip(f"-n {name} addr add 10.77.0.{number + 1}/24 dev eth0")
            for device in ("eth0", "lo"):
                _ip(f"-n {name} link set {device} up")
            _ip(f"netns exec {name} tc qdisc add dev eth0 root tbf rate {mbit}mbit burst 256kb latency 2s")
        yield names
    finally:
        for words in (*(f"netns delete {name}" for name in names), f"link delete {job}"):
            subprocess.run(["ip", *words.split()], check=False, stderr=subprocess.DEVNULL)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)
