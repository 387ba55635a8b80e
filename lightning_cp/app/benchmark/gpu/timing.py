"""Time and peak memory of a function on one device, and a process group that sends nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lightning_cp.app.benchmark.trace import read_trace, record_trace
from lightning_cp.compat.torch_names import fake_store

_REPEATS = 20


def seconds_of(step: Callable[[], object], device: torch.device) -> float:
    """Measure the median time of `step` in seconds; with CUDA events on a GPU."""
    for _ in range(3):
        step()
    if device.type == "cpu":
        times = []
        for _ in range(_REPEATS):
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
        return statistics.median(times)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_REPEATS)]  # type: ignore[no-untyped-call]
    for begin, end in pairs:
        begin.record()
        step()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median([float(begin.elapsed_time(end)) for begin, end in pairs]) / 1e3


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Measure the peak bytes that `step` allocates, without what was allocated before."""
    if device.type == "cpu":
        return read_trace(record_trace(step)).peak_bytes
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """Create a default process group of `ranks` ranks with collectives that send nothing; this process is rank 0."""
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: `torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")
