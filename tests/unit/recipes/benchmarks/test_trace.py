"""Values that are read from a trace."""

from __future__ import annotations

import pytest

from lightning_cp.recipes.benchmarks.trace import TraceSpan, read_trace, spans_of


def _memory(ts: float, size: int) -> dict[str, object]:
    return {"name": "[memory]", "ph": "i", "ts": ts, "args": {"Bytes": size, "Device Type": 0}}


def _span(name: str, begin: float, end: float, cat: str = "cpu_op") -> dict[str, object]:
    return {"name": name, "ph": "X", "ts": begin, "dur": end - begin, "cat": cat}


def test_bytes_are_summed_in_the_order_of_time() -> None:
    trace = read_trace([_memory(3, -40), _memory(1, 100), _memory(4, 20), _memory(2, 50)])
    assert (trace.peak_bytes, trace.held_bytes) == (150, 130)


def test_a_transfer_lasts_from_its_exchange_to_its_wait() -> None:
    marks = [("exchange 7", 1.0, 1.5), ("exchange 12", 2.0, 2.5), ("wait 7", 4.0, 5.0), ("wait 12", 6.0, 6.5)]
    events = [_span("step", 0.0, 10.0), *(_span(f"lightning_cp::{name}", a, b) for name, a, b in marks)]
    trace = read_trace(events)
    assert trace.transfers == (TraceSpan(1.5, 4.0), TraceSpan(2.5, 6.0))
    assert trace.exposed == pytest.approx(0.15)
    assert spans_of(events, "ste") == [TraceSpan(0.0, 10.0)]


def test_on_a_gpu_a_transfer_is_exposed_where_no_other_kernel_runs() -> None:
    events = [
        _span("flash", 0.0, 4.0, "kernel"),
        _span("ncclDevKernel_SendRecv", 3.0, 6.0, "kernel"),
        _span("flash", 5.0, 8.0, "kernel"),
        _span("flash", 5.5, 6.0, "kernel"),  # at the same time
        _span("ncclDevKernel_SendRecv", 8.0, 10.0, "kernel"),
        _span("lightning_cp::wait 1", 0.0, 9.0),  # of the host: nothing waits for it
    ]
    assert read_trace(events).exposed == pytest.approx(0.3)


def test_an_empty_trace_has_zero_figures() -> None:
    trace = read_trace([])
    assert (trace.peak_bytes, trace.transfers, trace.exposed) == (0, (), 0.0)
