"""What this machine has to run ranks on, found without importing torch."""

import ctypes
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Machine:
    """Cores that this process may use, and CUDA devices that torch would see (counted when first asked for)."""

    cores: int

    @classmethod
    def this(cls) -> "Machine":
        """The machine that this process runs on."""
        affinity = getattr(os, "sched_getaffinity", None)
        return cls(cores=len(affinity(0)) if affinity is not None else os.cpu_count() or 1)

    @cached_property
    def gpus(self) -> int:
        """Number of CUDA devices; 0 where there is no driver or torch is built without CUDA."""
        return count_gpus()

    @property
    def max_cpu_ranks(self) -> int:
        """More ranks than this on CPU are taken for a mistake."""
        return max(16, 4 * self.cores)


def count_gpus() -> int:
    """Asks torch in a process of its own, and only where there is a CUDA driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    answer = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return int(answer.stdout) if answer.returncode == 0 else 0


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
