"""Time and peak memory of a function on one device, and a process group that sends nothing."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lightning_cp.app.benchmark.trace import read_trace, record_trace

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


class Times(NamedTuple):
    """Seconds of a call. Attributes: host_s: CPU time of the thread that calls. wall_s: until the device is done."""

    host_s: float
    wall_s: float


def times_in_turn(
    steps: Mapping[Any, list[Callable[[], object]]], *, rounds: int, calls: int, device: torch.device
) -> dict[Any, list[Times]]:
    """Measure seconds per call in `rounds` of `calls` calls, in which the steps take turns: the lowest fifth."""
    measured: dict[Any, list[list[Times]]] = {name: [[] for _ in each] for name, each in steps.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of functions that diffusers calls
        for round_ in range(rounds + 1):
            for name, each in steps.items():
                for index, step in enumerate(each):
                    host, wall = time.thread_time(), time.perf_counter()
                    for _ in range(calls):
                        step()
                    host = time.thread_time() - host
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                    if round_:  # the first one warms up
                        measured[name][index].append(Times(host / calls, (time.perf_counter() - wall) / calls))
    return {name: [Times(*map(_lowest_fifth, zip(*times))) for times in each] for name, each in measured.items()}


def _lowest_fifth(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 5]


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


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: `torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")
