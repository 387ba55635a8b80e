"""Measure subjects in turn, so that other load on the machine disturbs all of them equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_cp.app.benchmark.subject import Subject
from lightning_cp.app.benchmark.trace import read_trace, record
from lightning_cp.comm.stats import STATS
from lightning_cp.mesh import moves_cuda_by

_WARM_UPS = 2


@dataclass
class Figures:
    """Measurements of one subject.

    Attributes:
        times_s: seconds of each repetition on the slowest rank.
        peak_bytes: peak memory allocated during a step, without what was allocated before; the largest over ranks.
        sent_bytes, exchanges: bytes sent and exchanges per step, the largest over ranks; None for other libraries.
        waited: fraction of a step in which a rank waits for a transfer and computes nothing: the median over steps
            (CUDA: the traced step); None for other libraries.
        refused: why the subject cannot run this workload; "" if it can.
    """

    times_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    sent_bytes: int | None = None
    exchanges: int | None = None
    waited: float | None = None
    refused: str = ""

    @property
    def best_s(self) -> float:
        """The fastest repetition: the one that was disturbed least."""
        return min(self.times_s)

    @property
    def median_s(self) -> float:
        """Median seconds of the repetitions."""
        return statistics.median(self.times_s)


def measure(
    subjects: Sequence[Subject], *, repeats: int, seconds: float, device: torch.device, traces: Path | None = None
) -> dict[str, Figures]:
    """Figures of each subject, by name.

    Args:
        repeats: fewest repetitions, each of all subjects.
        seconds: repetitions go on for so long.
        traces: a folder for a trace of each subject's step on the first rank, in Chrome's format.
    Ranks: all of the world, with equal arguments. Returns: the same on every rank.
    """
    found = {subject.name: Figures() for subject in subjects}
    steps: dict[str, Callable[[], object]] = {}
    for subject in subjects:
        step, refused = _built(subject, device)
        found[subject.name].refused = refused
        if not refused:
            steps[subject.name] = step
    able = [subject for subject in subjects if subject.name in steps]
    waited: dict[str, list[float]] = {subject.name: [] for subject in able}
    began, done = time.perf_counter(), 0
    while _goes_on(done < repeats or time.perf_counter() - began < seconds):
        for subject in able:
            before = STATS.waited_s
            elapsed = _timed(subject, steps[subject.name], device)
            found[subject.name].times_s.append(_most([elapsed])[0])
            waited[subject.name].append((STATS.waited_s - before) / max(elapsed, 1e-9))
        done += 1
    for subject in able:
        figures, exchanges, sent = found[subject.name], STATS.collectives, STATS.sent_bytes
        path = None if traces is None or dist.get_rank() else traces / f"{subject.name.replace(' ', '_')}.json"
        peak, exposed = _traced(subject, steps[subject.name], device, path)
        counted = [float(x) for x in (peak, STATS.collectives - exchanges, STATS.sent_bytes - sent)]
        share = statistics.median(waited[subject.name]) if device.type == "cpu" else exposed
        peak_, exchanges_, sent_, waited_ = _most([*counted, share])
        figures.peak_bytes = int(peak_)
        if exchanges_:
            figures.exchanges, figures.sent_bytes, figures.waited = int(exchanges_), int(sent_), waited_
    return found


def _built(subject: Subject, device: torch.device) -> tuple[Callable[[], object], str]:
    """The step, warmed up, and why it cannot be done on some rank ("" where it can)."""
    step: Callable[[], object] = lambda: None  # noqa: E731
    told = ""
    try:
        if not subject.alone or not dist.get_rank():
            step = subject.build()
            for _ in range(_WARM_UPS):
                step()
    except Exception as error:  # of any kind: it is another library's
        told = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, told)
    _settle(device)
    return step, next((x for x in everyone if x), "")


def _timed(subject: Subject, step: Callable[[], object], device: torch.device) -> float:
    """Seconds of a step on this rank; 0 where it takes no part."""
    dist.barrier()
    if subject.alone and dist.get_rank():
        return 0.0
    threads = torch.get_num_threads()
    if subject.threads:
        torch.set_num_threads(subject.threads)
    began = time.perf_counter()
    step()
    _settle(device)
    elapsed = time.perf_counter() - began
    torch.set_num_threads(threads)
    return elapsed


def _traced(subject: Subject, step: Callable[[], object], device: torch.device, path: Path | None) -> tuple[int, float]:
    """Peak bytes, and the share of the step in which a transfer is waited for, of one more step."""
    dist.barrier()
    if subject.alone and dist.get_rank():
        return 0, 0.0
    if device.type == "cpu":
        trace = read_trace(record(step, path))
        return trace.peak_bytes, trace.exposed
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    trace = read_trace(record(step, path))
    return torch.cuda.max_memory_allocated(device) - before, trace.exposed


def _goes_on(mine: bool) -> bool:
    """Stop all ranks together, when rank 0 decides to."""
    told = [mine]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _most(values: Sequence[float]) -> list[float]:
    most = torch.tensor(values, dtype=torch.float64)
    if moves_cuda_by("nccl"):
        most = most.cuda()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    found: list[float] = most.tolist()
    return found


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
