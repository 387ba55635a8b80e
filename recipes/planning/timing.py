"""Time steps in turn, so that other load on the machine disturbs all of them equally."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from lightning_cp.comm.stats import STATS
from lightning_cp.mesh.groups import cuda_backend_is

_Name = TypeVar("_Name")
Step = Callable[[], object]


class Times(NamedTuple):
    """Seconds of a call, on the slowest rank.

    Attributes:
        wall_s: until the device is done.
        host_s: CPU time of the thread that calls.
        waited_s: time in which the thread waits for transfers of this library.
    """

    wall_s: float
    host_s: float
    waited_s: float


def time_in_turn(
    steps: Mapping[_Name, Step], device: torch.device, *, rounds: int, calls: int = 1, seconds: float = 0.0
) -> dict[_Name, list[Times]]:
    """Time each step in several rounds, after one round that warms up. Returns: times per call, for each round.

    Args:
        steps: steps by name.
        device: device of the steps.
        rounds: minimum number of rounds.
        calls: calls of a step in a round. They follow one another without a wait for the device.
        seconds: minimum duration of all rounds.
    Ranks: the whole world, if there is a process group. A rank that has no part in a step has one that does nothing.
    """
    times: dict[_Name, list[Times]] = {name: [] for name in steps}
    count, started = -1, time.perf_counter()
    while _decide_on_rank_zero(count < rounds or time.perf_counter() - started < seconds):
        for name, step in steps.items():
            if dist.is_initialized():
                dist.barrier()
            waited, host, wall = STATS.waited_s, time.thread_time(), time.perf_counter()
            for _ in range(calls):
                step()
            host = time.thread_time() - host
            synchronize(device)
            wall = time.perf_counter() - wall
            slowest = max_over_ranks([wall, host, STATS.waited_s - waited])
            if count >= 0:
                times[name].append(Times(*(x / calls for x in slowest)))
        count += 1
        if not count:
            started = time.perf_counter()
    return times


def low_quartile(values: Sequence[float]) -> float:
    """Return the value below which a quarter of the values is: of times, those that other load disturbed least."""
    return sorted(values)[len(values) // 4]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _decide_on_rank_zero(proceed: bool) -> bool:
    """Return rank 0's decision on every rank, so that all ranks stop together."""
    message = [proceed]
    if dist.is_initialized():
        dist.broadcast_object_list(message, src=0)
    return message[0]


def max_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the largest of each value over all ranks. Ranks: the whole world, if there is a process group."""
    if not dist.is_initialized():
        return list(values)
    largest = torch.tensor(values, dtype=torch.float64)
    if cuda_backend_is("nccl"):
        largest = largest.cuda()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    values_: list[float] = largest.tolist()
    return values_


def machine_name() -> str:
    """Describe the GPUs, or the cores and the CPU."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    info = Path("/proc/cpuinfo")
    lines = [x for x in info.read_text().splitlines() if x.startswith("model name")] if info.is_file() else []
    name = lines[0].split(":", 1)[1].strip() if lines else platform.processor()
    return f"{os.cpu_count()} cores of {name}, torch {torch.__version__}"
