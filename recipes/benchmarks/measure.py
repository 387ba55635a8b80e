"""Measure subjects in turn, so that other load on the machine disturbs all of them equally."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_cp.comm.agree import gather_objects
from lightning_cp.comm.stats import STATS
from lightning_cp.recipes.benchmarks.subject import Subject
from lightning_cp.recipes.benchmarks.trace import read_trace, record_trace
from lightning_cp.recipes.planning.timing import Step, max_over_ranks, synchronize, time_in_turn


@dataclass
class Figures:
    """Measurements of one subject.

    Attributes:
        times_s: seconds of each repetition on the slowest rank.
        peak_bytes: peak memory allocated during a step, without what was allocated before; the largest over ranks.
        sent_bytes, exchanges: bytes sent and exchanges per step, the largest over ranks; None for other libraries.
        waited: fraction of a step in which a rank waits for a transfer and computes nothing: the median over steps
            (CUDA: the traced step); None for other libraries.
        work: see `Subject`.
        refused: why the subject cannot run this workload; "" if it can.
    """

    times_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    sent_bytes: int | None = None
    exchanges: int | None = None
    waited: float | None = None
    work: float = 1.0
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
    figures_of = {x.name: Figures(work=x.work) for x in subjects}
    steps: dict[str, Step] = {}
    for subject in subjects:
        step, refused = _build(subject, device)
        figures_of[subject.name].refused = refused
        if not refused:
            steps[subject.name] = step
    runnable = [subject for subject in subjects if subject.name in steps]
    times = time_in_turn(steps, device, rounds=repeats, seconds=seconds)
    for subject in runnable:
        figures, exchanges, sent = figures_of[subject.name], STATS.collectives, STATS.sent_bytes
        figures.times_s = [x.wall_s / subject.steps for x in times[subject.name]]
        waited = statistics.median(x.waited_s / max(x.wall_s, 1e-9) for x in times[subject.name])
        path = None if traces is None or dist.get_rank() else traces / f"{subject.name.replace(' ', '_')}.json"
        peak, exposed = _trace_step(subject, steps[subject.name], device, path)
        counted = [float(x) for x in (peak, STATS.collectives - exchanges, STATS.sent_bytes - sent)]
        peak_, exchanges_, sent_, exposed_ = max_over_ranks([*counted, exposed])
        figures.peak_bytes = int(peak_)
        if exchanges_:
            figures.exchanges, figures.sent_bytes = int(exchanges_ / subject.steps), int(sent_ / subject.steps)
            figures.waited = waited if device.type == "cpu" else exposed_
    return figures_of


def _build(subject: Subject, device: torch.device) -> tuple[Step, str]:
    """Build a step and run it once. Returns: the step, and the error of a rank that cannot run it ("" if all can)."""
    step: Step = lambda: None  # noqa: E731
    message = ""
    try:
        if not subject.rank_zero_only or not dist.get_rank():
            step = _with_threads(subject.build(), subject.threads)
            step()
    except Exception as error:  # any exception: the step may belong to another library
        message = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    messages = gather_objects(message, dist.group.WORLD)
    synchronize(device)
    return step, next((x for x in messages if x), "")


def _with_threads(step: Step, count: int) -> Step:
    """Return a step that runs with this number of CPU threads; 0: unchanged."""

    def run() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            step()
        finally:
            torch.set_num_threads(threads)

    return run if count else step


def _trace_step(subject: Subject, step: Step, device: torch.device, path: Path | None) -> tuple[int, float]:
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
