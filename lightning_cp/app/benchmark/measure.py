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
from lightning_cp.app.benchmark.trace import read_trace, record_trace
from lightning_cp.comm.agree import gather_objects
from lightning_cp.comm.stats import STATS
from lightning_cp.mesh.groups import cuda_backend_is

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
        work, imbalance: see `Subject`.
        refused: why the subject cannot run this workload; "" if it can.
    """

    times_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    sent_bytes: int | None = None
    exchanges: int | None = None
    waited: float | None = None
    work: float = 1.0
    imbalance: float | None = None
    refused: str = ""

    @property
    def best_s(self) -> float:
        """The fastest repetition: the one that was disturbed least."""
        return min(self.times_s)

    @property
    def median_s(self) -> float:
        """Median seconds of the repetitions."""
        return statistics.median(self.times_s)


def measure_subjects(
    subjects: Sequence[Subject], *, repeats: int, seconds: float, device: torch.device, traces: Path | None = None
) -> dict[str, Figures]:
    """Measure each subject. Returns: figures by name, the same on every rank.

    Args:
        subjects: ways to do the same step.
        repeats: minimum number of repetitions, each of all subjects.
        seconds: minimum duration of the repetitions together.
        device: device of the measurement.
        traces: folder for a Chrome trace of each subject's step on rank 0; None: no traces.
    Ranks: the whole world, with equal arguments.
    """
    figures_of = {x.name: Figures(work=x.work, imbalance=x.imbalance) for x in subjects}
    steps: dict[str, Callable[[], object]] = {}
    for subject in subjects:
        step, refused = _build(subject, device)
        figures_of[subject.name].refused = refused
        if not refused:
            steps[subject.name] = step
    runnable = [subject for subject in subjects if subject.name in steps]
    waited: dict[str, list[float]] = {subject.name: [] for subject in runnable}
    started, count = time.perf_counter(), 0
    while decide_on_rank_zero(count < repeats or time.perf_counter() - started < seconds):
        for subject in runnable:
            before = STATS.waited_s
            elapsed = _time_step(subject, steps[subject.name], device)
            figures_of[subject.name].times_s.append(max_over_ranks([elapsed])[0] / subject.steps)
            waited[subject.name].append((STATS.waited_s - before) / max(elapsed, 1e-9))
        count += 1
    for subject in runnable:
        figures, exchanges, sent = figures_of[subject.name], STATS.collectives, STATS.sent_bytes
        path = None if traces is None or dist.get_rank() else traces / f"{subject.name.replace(' ', '_')}.json"
        peak, exposed = _trace_step(subject, steps[subject.name], device, path)
        counted = [float(x) for x in (peak, STATS.collectives - exchanges, STATS.sent_bytes - sent)]
        waiting = statistics.median(waited[subject.name]) if device.type == "cpu" else exposed
        peak_, exchanges_, sent_, waited_ = max_over_ranks([*counted, waiting])
        figures.peak_bytes = int(peak_)
        if exchanges_:
            figures.exchanges, figures.sent_bytes = int(exchanges_ / subject.steps), int(sent_ / subject.steps)
            figures.waited = waited_
    return figures_of


def _build(subject: Subject, device: torch.device) -> tuple[Callable[[], object], str]:
    """Build a step and warm it up. Returns: the step, and the error of a rank that cannot run it ("" if all can)."""
    step: Callable[[], object] = lambda: None  # noqa: E731
    message = ""
    try:
        if not subject.rank_zero_only or not dist.get_rank():
            step = subject.build()
            for _ in range(_WARM_UPS):
                step()
    except Exception as error:  # any exception: the step may belong to another library
        message = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    messages = gather_objects(message, dist.group.WORLD)
    synchronize(device)
    return step, next((x for x in messages if x), "")


def _time_step(subject: Subject, step: Callable[[], object], device: torch.device) -> float:
    """Run a step. Returns: seconds on this rank; 0 if this rank does not take part."""
    dist.barrier()
    if subject.rank_zero_only and dist.get_rank():
        return 0.0
    threads = torch.get_num_threads()
    if subject.threads:
        torch.set_num_threads(subject.threads)
    started = time.perf_counter()
    step()
    synchronize(device)
    elapsed = time.perf_counter() - started
    torch.set_num_threads(threads)
    return elapsed


def _trace_step(
    subject: Subject, step: Callable[[], object], device: torch.device, path: Path | None
) -> tuple[int, float]:
    """Trace one more step. Returns: peak bytes, and the fraction of the step spent waiting for transfers."""
    dist.barrier()
    if subject.rank_zero_only and dist.get_rank():
        return 0, 0.0
    if device.type == "cpu":
        trace = read_trace(record_trace(step, path))
        return trace.peak_bytes, trace.exposed
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    trace = read_trace(record_trace(step, path))
    return torch.cuda.max_memory_allocated(device) - before, trace.exposed


def low_quartile(times: Sequence[float]) -> float:
    """Return the time below which a quarter of the times is: those that other load disturbed least."""
    return sorted(times)[len(times) // 4]


def decide_on_rank_zero(proceed: bool) -> bool:
    """Return rank 0's decision on every rank, so that all ranks stop together."""
    message = [proceed]
    dist.broadcast_object_list(message, src=0)
    return message[0]


def max_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the largest of each value over all ranks. Ranks: the whole world."""
    largest = torch.tensor(values, dtype=torch.float64)
    if cuda_backend_is("nccl"):
        largest = largest.cuda()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    values_: list[float] = largest.tolist()
    return values_


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
