"""Figures of the workload `data` become rows, cells and a plot; waiting for files is measured."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lightning_cp.app.benchmark.data import _Clock
from lightning_cp.app.benchmark.data_rows import DataFigures, data_rows
from lightning_cp.app.benchmark.plots import draw_data
from lightning_cp.app.benchmark.report import markdown_page, tables, terminal_table, write_csv

FOUND = {
    "training steps, 0 workers": DataFigures(2, times_s=[1.0, 3.0, 2.0], waited_s=[0.1, 0.5, 0.9]),
    "precompute, captions": DataFigures(8, times_s=[4.0, 4.0, 4.0, 8.0]),
    "precompute, clips": DataFigures(refused="ValueError: no | codec"),
}


def test_waiting_is_a_ratio_of_medians_and_samples_are_counted_at_the_median() -> None:
    steps, text, refused = data_rows(4096, FOUND)
    assert steps["waited"] == pytest.approx(0.5 / 2)
    assert steps["samples_per_s"] == pytest.approx(2 / 2)
    assert (steps["best_s"], steps["median_s"]) == (1.0, 2.0)
    assert steps["spread"] == pytest.approx((3.0 - 1.0) / 2)
    assert text["waited"] is None
    assert text["samples_per_s"] == pytest.approx(8 / 4)
    assert refused["samples_per_s"] is refused["best_s"] is refused["waited"] is None


def test_a_page_has_a_table_with_samples_per_second(tmp_path: Path) -> None:
    rows = data_rows(4096, FOUND)
    page = markdown_page(rows, machine="a machine", command="python recipes/bench.py", pictures=[])
    assert "## Data, 4,096 tokens, 1 rank\n\n|  | ms | median | spread | samples/s | waiting |\n|---|" in page
    assert "| training steps, 0 workers | 1000.0 | 2000.0 | 100 % | 1.00 | 25.0 % |" in page
    assert "| precompute, captions | 4000.0 | 4000.0 | 100 % | 2.00 | – |" in page
    assert "| precompute, clips | ValueError: no / codec |  |  |  |  |" in page
    assert "*waiting* is the median\ntime until the next batch" in page
    ((title, cells),) = tables(rows)
    assert [column.header for column in terminal_table(title, cells).columns][4] == "samples/s"
    write_csv(rows, tmp_path / "bench.csv")
    assert (tmp_path / "bench.csv").read_text().splitlines()[0].endswith("samples_per_s,refused")
    draw_data(rows, tmp_path / "data.png")
    assert (tmp_path / "data.png").read_bytes().startswith(b"\x89PNG")


def test_only_the_time_between_samples_is_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def encode(x: int) -> int:
        now[0] += 5.0
        return x + 1

    clock = _Clock()
    for _ in range(2):
        clock.start()
        for wait in (1.0, 0.25):
            now[0] += wait  # the file is read
            assert clock.around(encode, (1,), {}) == 2
            now[0] += 0.5  # the sample is written
            clock.finished(1)
        assert clock.waited_s == pytest.approx(1.25)
        assert clock.elapsed_s == pytest.approx(1.25 + 2 * 5.5)
