"""Measure the memory that a rank has used."""

import resource
import sys

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process so far: on a GPU its allocated memory, on the CPU its resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB
