"""A step as PyTorch's profiler saw it: what was allocated when, and when a rank waited while others computed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_cp.comm.notes import NOTES
from lightning_cp.comm.transfer import WAIT


@dataclass(frozen=True)
class Trace:
    """Of one step of one rank.

    Attributes:
        peak_bytes: most that was allocated at once, beyond what was there at the beginning (CPU).
        held_bytes: still allocated at the end, likewise.
        duration_us: of the step.
        wait_us: in which the rank's thread waited for a transfer.
    """

    peak_bytes: int
    held_bytes: int
    duration_us: float
    wait_us: float


def record(step: Callable[[], object], path: Path | None = None) -> list[dict[str, Any]]:
    """Runs a step under the profiler. Returns: the events of the trace, which is also written to `path`."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=True) as found, _marked():
        step()
    with tempfile.TemporaryDirectory(prefix="lightning_cp_") as folder:
        where = Path(folder) / "trace.json" if path is None else path
        where.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(where))
        events: list[dict[str, Any]] = json.loads(where.read_text(encoding="utf-8"))["traceEvents"]
    return events


@contextmanager
def _marked() -> Iterator[None]:
    NOTES.traced = True
    try:
        yield
    finally:
        NOTES.traced = False


def read_trace(events: list[dict[str, Any]]) -> Trace:
    """What a trace says."""
    allocations = [x for x in events if x["name"] == "[memory]" and x["args"]["Device Type"] == 0]
    held = most = 0
    for event in sorted(allocations, key=lambda x: float(x["ts"])):
        held += event["args"]["Bytes"]
        most = max(most, held)
    spans = [x for x in events if x.get("ph") == "X" and "dur" in x]
    first = min((float(x["ts"]) for x in spans), default=0.0)
    last = max((float(x["ts"]) + float(x["dur"]) for x in spans), default=0.0)
    waits = sum(float(x["dur"]) for x in spans if x["name"] == WAIT)
    return Trace(most, held, last - first, waits)
