"""Find the CPU cores and GPUs of this machine without importing torch."""

import ctypes
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """CPU cores that this process may use, and CUDA devices that torch would see (counted at first access)."""

    cores: int

    @classmethod
    def this(cls) -> "Machine":
        """Describe the machine that this process runs on."""
        affinity = getattr(os, "sched_getaffinity", None)
        return cls(cores=len(affinity(0)) if affinity is not None else os.cpu_count() or 1)

    @cached_property
    def gpus(self) -> int:
        """Number of CUDA devices; 0 without a driver or with a torch built without CUDA."""
        return count_gpus()

    @property
    def max_cpu_ranks(self) -> int:
        """Largest accepted number of CPU ranks; more are assumed to be a mistake."""
        return max(16, 4 * self.cores)


def free_memory_bytes(accelerator: str) -> int | None:
    """Return the bytes of free memory, of this host or of the first GPU; None if they cannot be read."""
    if accelerator == "cpu":
        try:
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        except (OSError, StopIteration, ValueError):
            return None
    return _ask_torch("torch.cuda.mem_get_info(0)[0]")


def count_gpus() -> int:
    """Count CUDA devices with torch in a subprocess; return 0 without starting it if there is no CUDA driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    return _ask_torch("torch.cuda.device_count() if torch.cuda.is_available() else 0") or 0


def _ask_torch(number: str) -> int | None:
    """Evaluate an expression in a process that imports torch; None if it fails."""
    command = [sys.executable, "-c", f"import torch; print({number})"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return int(answer.stdout) if answer.returncode == 0 else None


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
