import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from lightning_cp.recipes.training import records
from lightning_cp.recipes.training.loop import StepReport
from lightning_cp.recipes.training.metrics import show_whole
from lightning_cp.recipes.training.records import LoggedMetrics, MetricsFile, ProgressBar, draw_loss_curve, read_metrics


def report(step: int, loss: float = 0.5) -> StepReport:
    return StepReport(step, loss, 1e-3, 1.0, 0.1, 640.0)


def write(path: Path, steps: int, losses: Callable[[int], float] = lambda step: 0.5) -> None:
    with MetricsFile(path) as metrics:
        for step in range(1, steps + 1):
            metrics.watch(report(step, losses(step)))


def test_metrics_begin_with_step_and_loss_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, 3, lambda step: 1 / 3)
    assert path.read_text().splitlines()[0].startswith("step,loss,")
    assert [row.step for row in read_metrics(path)] == [1, 2, 3]
    assert read_metrics(path)[0].loss == pytest.approx(1 / 3, rel=1e-7)


def test_resuming_in_the_same_folder_keeps_the_rows_before_and_drops_those_after(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, 5)
    with MetricsFile(path, resumed_at=3) as metrics:
        metrics.watch(report(4, 0.25))
    assert [(row.step, row.loss) for row in read_metrics(path)][2:] == [(3, 0.5), (4, 0.25)]


def test_a_last_row_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, 3)
    whole = path.read_bytes()
    for cut in range(1, len(whole.splitlines()[-1])):
        path.write_bytes(whole[:-cut])
        assert [row.step for row in read_metrics(path)] == [1, 2]
    with MetricsFile(path, resumed_at=3) as metrics:
        metrics.watch(report(4))
    assert [row.step for row in read_metrics(path)] == [1, 2, 4]
    path.write_bytes(whole + bytes(100))  # a file system may leave zeros after a loss of power
    assert [row.step for row in read_metrics(path)] == [1, 2, 3]
    path.write_bytes(b"")
    assert read_metrics(path) == []


def test_another_row_that_is_damaged_is_an_error_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, 3)
    whole = path.read_text()
    for damaged in (whole.replace("\n2,", "\n2,oops,", 1), whole.replace("\n2,0.5", "\nx2", 1)):
        path.write_text(damaged)
        with pytest.raises(ValueError, match=r"metrics\.csv is damaged in line 3"):
            MetricsFile(path, resumed_at=3)
        assert path.read_text() == damaged


class Logger:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append(metrics)

    def finalize(self, status: str) -> None:
        assert status == "success"


def test_the_loss_of_each_expert_is_logged_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger, labels = Logger(), list[str]()
    with MetricsFile(tmp_path / "metrics.csv") as metrics, LoggedMetrics(logger) as logged:
        for step, expert in enumerate((1.0, 2.0, 2.0, 1.0, math.nan), 1):
            for watcher in (metrics, logged):
                watcher.watch(replace(report(step, step / 8), expert=expert))
    by_expert = [{key: x for key, x in row.items() if "expert" in key} for row in logger.rows]
    first, second = "loss_expert_1", "loss_expert_2"
    assert by_expert == [{first: 0.125}, {second: 0.25}, {second: 0.375}, {first: 0.5}, {}]
    assert [row.expert for row in read_metrics(tmp_path / "metrics.csv")[:4]] == [1.0, 2.0, 2.0, 1.0]

    def plot(axes: Axes, steps: list[int], losses: list[float], *, label: str, **_: Any) -> list[Any]:
        labels.append(f"{label}: {steps}")
        return drawn(axes, steps, losses, label=label)

    drawn = Axes.plot
    monkeypatch.setattr(Axes, "plot", plot)
    draw_loss_curve(tmp_path / "metrics.csv", tmp_path / "loss.png")
    assert labels == ["a step: [1, 2, 3, 4, 5]", "mean of 25, expert 1: [1, 4]", "mean of 25, expert 2: [2, 3]"]


def test_a_file_without_skipped_steps_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss,lr,grad_norm,step_time_s,tokens_per_s\n1,0.5,0.1,1.0,0.1,64\n")
    with MetricsFile(path, resumed_at=1) as metrics:
        metrics.watch(StepReport(2, math.nan, 0.1, math.inf, 0.1, 64, skipped=1))
    first, second = read_metrics(path)
    assert first == StepReport(1, 0.5, 0.1, 1.0, 0.1, 64, skipped=0)
    assert (second.skipped, second.grad_norm, math.isnan(second.loss)) == (1, math.inf, True)
    draw_loss_curve(path, tmp_path / "loss.png")


def test_rows_can_be_fewer_but_the_first_is_there(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "metrics.csv", every=5) as metrics:
        for step in range(1, 11):
            metrics.watch(report(step))
    assert [row.step for row in read_metrics(tmp_path / "metrics.csv")] == [1, 5, 10]


def test_the_loss_curve_is_a_png(tmp_path: Path) -> None:
    write(tmp_path / "metrics.csv", 39, lambda step: 1 / step)
    draw_loss_curve(tmp_path / "metrics.csv", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_terminal_progress_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar(total=7, every=3) as bar:
        for step in range(1, 8):
            bar.watch(report(step))
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[1] for line in lines] == ["3/7", "6/7", "7/7"]
    assert "loss 0.5000  100 ms  640 tokens/s" in lines[0]


def test_a_line_is_due_after_a_minute_and_after_a_validation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(records.time, "monotonic", lambda: now[0])
    with ProgressBar(total=9, every=50) as bar:
        for step in range(1, 10):
            now[0] += 25
            bar.watch(replace(report(step), val_loss=0.75 if step == 4 else math.nan))
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[1] for line in lines] == ["3/9", "4/9", "7/9", "9/9"]
    assert ["val_loss 0.7500" in line for line in lines] == [False, True, True, True]


def test_a_resumed_run_continues_the_metrics_of_the_other_folder(tmp_path: Path) -> None:
    first, second = tmp_path / "metrics.csv", tmp_path / "second.csv"
    write(first, 5, lambda step: 1 / step)
    with MetricsFile(second, resumed_at=3, resumed=first) as metrics:
        metrics.watch(report(4, 0.125))
    assert [(row.step, row.loss) for row in read_metrics(second)][1:] == [(2, 0.5), (3, 0.33333333), (4, 0.125)]
    assert len(read_metrics(first)) == 5
    with MetricsFile(second, resumed_at=4, resumed=first) as metrics:  # its own file counts
        metrics.watch(report(5))
    assert [row.step for row in read_metrics(second)] == [1, 2, 3, 4, 5]
    with MetricsFile(tmp_path / "third.csv", resumed_at=3, resumed=tmp_path / "missing.csv") as metrics:
        metrics.watch(report(4))
    assert [row.step for row in read_metrics(tmp_path / "third.csv")] == [4]


def test_the_curve_shows_validation_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[str, Any] = {}
    drawn = Axes.plot

    def plot(axes: Axes, steps: list[int], losses: list[float], *more: Any, label: str, **options: Any) -> list[Any]:
        shown[label] = list(zip(steps, losses))
        return drawn(axes, steps, losses, *more, label=label, **options)

    monkeypatch.setattr(Axes, "plot", plot)
    with MetricsFile(tmp_path / "metrics.csv") as metrics:
        for step in range(1, 5):
            metrics.watch(replace(report(step), val_loss=1 / step if step % 2 == 0 else math.nan))
    draw_loss_curve(tmp_path / "metrics.csv", tmp_path / "loss.png")
    assert shown["validation"] == [(2, 0.5), (4, 0.25)]


def test_curves_fill_the_plot_and_are_not_cut_off() -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    axes.plot([1, 2, 3], [2.0, 4.0, float("nan")])
    show_whole(axes)
    assert axes.get_ylim() == pytest.approx((1.9, 4.1))
    empty = Figure().add_subplot()
    empty.plot([1], [float("nan")])
    show_whole(empty)
