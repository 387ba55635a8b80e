"""Find the CPU cores and GPUs of this machine without importing torch."""

import ctypes
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property


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


def describe_gpu() -> tuple[str, int] | None:
    """Return the name of the first GPU and its bytes of memory; None if they cannot be read."""
    answer = _ask_torch("torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_name(0)")
    memory, _, name = (answer or "").partition(" ")
    return (name, int(memory)) if name else None


def count_gpus() -> int:
    """Count CUDA devices with torch in a subprocess; return 0 without starting it if there is no CUDA driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    return int(_ask_torch("torch.cuda.device_count() if torch.cuda.is_available() else 0") or 0)


def _ask_torch(expressions: str) -> str | None:
    """Print expressions in a process that imports torch, which would keep GPU memory; None if it fails."""
    command = [sys.executable, "-c", f"import torch; print({expressions})"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
