"""Read memory use and exposed communication of a step from PyTorch's profiler."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning_cp.checkpoint.folder import temporary_folder
from lightning_cp.comm.packet import BUFFERS
from lightning_cp.comm.stats import traced
from lightning_cp.comm.transfer import EXCHANGE, WAIT


class TraceSpan(NamedTuple):
    """An interval of time, in microseconds."""

    begin: float
    end: float


@dataclass(frozen=True)
class Trace:
    """One profiled step of one rank.

    Attributes:
        peak_bytes: peak memory allocated during the step, without what was allocated before (CPU).
        held_bytes: memory allocated during the step that is still held at its end (CPU).
        transfers: one interval per exchange, from its start to the wait for its result.
        exposed: fraction of the step in which a transfer is waited for and nothing is computed (CPU: by the rank's
            thread; CUDA: by the GPU).
    """

    peak_bytes: int
    held_bytes: int
    transfers: tuple[TraceSpan, ...]
    exposed: float


def record_trace(step: Callable[[], object], path: Path | None = None) -> list[dict[str, Any]]:
    """Run a step under the profiler. Returns: the events of the trace, which is also written to `path`."""
    BUFFERS.forget()  # what a step needs is counted, not what an earlier one left
    with traced(memory=True) as profiler:
        step()
        BUFFERS.forget()  # used by the next call, not held for this one's backward
    with temporary_folder() as folder:
        file = folder / "trace.json" if path is None else path
        file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return events


def read_trace(events: list[dict[str, Any]]) -> Trace:
    """Compute the figures of a trace from its events."""
    allocations = [x for x in events if x["name"] == "[memory]" and x["args"]["Device Type"] == 0]
    allocated = peak = 0
    for event in sorted(allocations, key=lambda x: float(x["ts"])):
        allocated += event["args"]["Bytes"]
        peak = max(peak, allocated)
    spans = [x for x in events if x.get("ph") == "X" and "dur" in x and x.get("cat") != "gpu_user_annotation"]
    begun = {_number(x): _span(x).end for x in spans if x["name"].startswith(EXCHANGE)}
    waits = {_number(x): _span(x) for x in spans if x["name"].startswith(WAIT)}
    transfers = tuple(TraceSpan(begun[number], wait.begin) for number, wait in sorted(waits.items()) if number in begun)
    kernels = [x for x in spans if x.get("cat") == "kernel"]
    if kernels:
        computing = _covered(_span(x) for x in kernels if "nccl" not in x["name"])
        exposed = _covered(map(_span, kernels)) - computing
    else:
        exposed = _covered(waits.values())
    timeline = [_span(x) for x in kernels or spans]
    length = max((x.end for x in timeline), default=0.0) - min((x.begin for x in timeline), default=0.0)
    return Trace(peak, allocated, transfers, exposed / length if length else 0.0)


def spans_of(events: list[dict[str, Any]], name: str) -> list[TraceSpan]:
    """Return the intervals of the events with `name` in their name."""
    return [_span(x) for x in events if x.get("ph") == "X" and name in x["name"]]


def _span(event: dict[str, Any]) -> TraceSpan:
    return TraceSpan(float(event["ts"]), float(event["ts"]) + float(event["dur"]))


def _number(event: dict[str, Any]) -> int:
    return int(event["name"].rpartition(" ")[2])


def _covered(spans: Iterable[TraceSpan]) -> float:
    """Return the length of the union of the intervals, in microseconds."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans):
        total += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return total
