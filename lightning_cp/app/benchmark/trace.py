"""A step as PyTorch's profiler saw it: what was allocated when, and when a rank waited while others computed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning_cp.comm.buffers import BUFFERS
from lightning_cp.comm.tracing import traced
from lightning_cp.comm.transfer import EXCHANGE, WAIT


class Span(NamedTuple):
    """Of time, in microseconds."""

    begin: float
    end: float


@dataclass(frozen=True)
class Trace:
    """Of one step of one rank.

    Attributes:
        peak_bytes: most that was allocated at once, beyond what was there at the beginning (CPU).
        held_bytes: still allocated at the end, likewise.
        under_way: of each exchange, from when it was begun to when the rank's thread asked for what came.
        exposed: share of the step in which a transfer is waited for and nothing is computed: by the thread, or, where
            kernels ran on a GPU, by that.
    """

    peak_bytes: int
    held_bytes: int
    under_way: tuple[Span, ...]
    exposed: float


def record(step: Callable[[], object], path: Path | None = None) -> list[dict[str, Any]]:
    """Runs a step under the profiler. Returns: the events of the trace, which is also written to `path`."""
    BUFFERS.forget()  # what a step needs is counted, not what an earlier one left
    with traced(memory=True) as found:
        step()
        BUFFERS.forget()  # used by the next call, not held for this one's backward
    with tempfile.TemporaryDirectory(prefix="lightning_cp_") as folder:
        where = Path(folder) / "trace.json" if path is None else path
        where.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(where))
        events: list[dict[str, Any]] = json.loads(where.read_text(encoding="utf-8"))["traceEvents"]
    return events


def read_trace(events: list[dict[str, Any]]) -> Trace:
    """What a trace says."""
    allocations = [x for x in events if x["name"] == "[memory]" and x["args"]["Device Type"] == 0]
    held = most = 0
    for event in sorted(allocations, key=lambda x: float(x["ts"])):
        held += event["args"]["Bytes"]
        most = max(most, held)
    spans = [x for x in events if x.get("ph") == "X" and "dur" in x and x.get("cat") != "gpu_user_annotation"]
    begun = {_number(x): _span(x).end for x in spans if x["name"].startswith(EXCHANGE)}
    waits = {_number(x): _span(x) for x in spans if x["name"].startswith(WAIT)}
    under_way = tuple(Span(begun[number], wait.begin) for number, wait in sorted(waits.items()) if number in begun)
    kernels = [x for x in spans if x.get("cat") == "kernel"]
    if kernels:
        computing = _covered(_span(x) for x in kernels if "nccl" not in x["name"])
        alone = _covered(map(_span, kernels)) - computing
    else:
        alone = _covered(waits.values())
    whole = [_span(x) for x in kernels or spans]
    length = max((x.end for x in whole), default=0.0) - min((x.begin for x in whole), default=0.0)
    return Trace(most, held, under_way, alone / length if length else 0.0)


def spans_of(events: list[dict[str, Any]], name: str) -> list[Span]:
    """When what is called so ran. Args: name: or a part of it."""
    return [_span(x) for x in events if x.get("ph") == "X" and name in x["name"]]


def _span(event: dict[str, Any]) -> Span:
    return Span(float(event["ts"]), float(event["ts"]) + float(event["dur"]))


def _number(event: dict[str, Any]) -> int:
    return int(event["name"].rpartition(" ")[2])


def _covered(spans: Iterable[Span]) -> float:
    """Microseconds in which at least one of them is."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans):
        total += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return total
