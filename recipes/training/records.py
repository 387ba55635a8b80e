"""Record a run: metrics.csv, the loss curve, the progress bar."""

import csv
import math
import time
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typing_extensions import override

from lightning_cp.checkpoint.folder import atomic_file
from lightning_cp.files import no_link, writing, writing_new
from lightning_cp.recipes.training.loop import StepReport, Watcher
from lightning_cp.recipes.training.metrics import OPTIONAL_COLUMNS, read_metric_rows, show_whole

COLUMNS = tuple(field.name for field in fields(StepReport))
_WINDOW = 25  # rows of the running mean
_LINE_S = 60.0  # without a terminal, a run that prints nothing for longer looks like one that hangs


class MetricsFile(Watcher):
    """Write one CSV row every `every` steps and flush it at once.

    An existing file is continued, or else that of the resumed run: rows up to the resumed step are kept, later rows
    are dropped. The kept rows are written to a temporary file that then replaces the old one, so a kill leaves either
    the old file or the new one.

    Args:
        path: path of the CSV file.
        resumed_at: step of the resumed checkpoint; 0 for a new run.
        resumed: metrics.csv of the resumed run; None for a new run.
        every: steps between two rows; the first step of this process always has a row.
    """

    def __init__(self, path: Path, *, resumed_at: int = 0, resumed: Path | None = None, every: int = 1) -> None:
        self._every, self._first = every, True
        earlier = path if path.exists() or resumed is None or not resumed.is_file() else resumed
        kept = [row for row in read_metrics(earlier) if row.step <= resumed_at] if earlier.exists() else []
        with atomic_file(path) as scratch, scratch.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *map(_cells, kept)])
        self._file = open(path, "a", newline="", encoding="utf-8", opener=no_link)  # noqa: SIM115
        self._writer = csv.writer(self._file)

    @override
    def watch(self, report: StepReport) -> None:
        if self._first or report.step % self._every == 0:
            with writing(self._file.name, "Its earlier rows and the checkpoints are kept"):
                self._writer.writerow(_cells(report))
                self._file.flush()
        self._first = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with writing(self._file.name, "Its earlier rows and the checkpoints are kept"):
            self._file.close()


class LoggedMetrics(Watcher):
    """Log the values of `StepReport` with a logger of Lightning, every `every` steps.

    Args:
        logger: for instance TensorBoardLogger. It is finalized when the context closes.
        every: steps between two reports; a validation loss is always logged.
    """

    def __init__(self, logger: Any, *, every: int = 1) -> None:
        self._logger, self._every = logger, every

    @override
    def watch(self, report: StepReport) -> None:
        values = {name: x for name, x in asdict(report).items() if name not in ("step", "val_loss", "expert")}
        if not math.isnan(report.expert):
            values[f"loss_expert_{report.expert:.0f}"] = report.loss
        due = values if report.step % self._every == 0 else {}
        if not math.isnan(report.val_loss):
            due = {**due, "val_loss": report.val_loss}
        if due:
            self._logger.log_metrics(due, step=report.step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._logger.finalize("success" if kind is None else "failed")


def _cells(report: StepReport) -> list[int | str]:
    values = asdict(report)
    empty = {name for name in OPTIONAL_COLUMNS if math.isnan(values[name])}
    return ["" if name in empty else x if isinstance(x, int) else f"{x:.8g}" for name, x in values.items()]


def read_metrics(path: Path) -> list[StepReport]:
    """Read the rows of a `metrics.csv`. Raises: FileNotFoundError, ValueError: it does not exist, or is damaged."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    rows = list(read_metric_rows(path))
    defaults = {x.name: x.default for x in fields(StepReport) if x.default is not MISSING}  # columns of later versions
    missing = [name for name in COLUMNS if rows and name not in rows[0] and name not in defaults]
    if missing:
        raise ValueError(f"{path} has no column {', '.join(missing)}")
    integer_columns = ("step", "skipped")
    cells = [{**defaults, **{name: row[name] for name in COLUMNS if name in row}} for row in rows]
    return [StepReport(**{name: int(x) if name in integer_columns else x for name, x in row.items()}) for row in cells]


def draw_loss_curve(metrics: Path, picture: Path) -> None:
    """Plot the loss, its running mean (for each expert) and the validation loss as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: no state, no display

    rows = read_metrics(metrics)
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([row.step for row in rows], [row.loss for row in rows], color="0.75", linewidth=0.8, label="a step")
    for number in sorted({row.expert for row in rows if not math.isnan(row.expert)}) or (math.nan,):
        trained = [row for row in rows if math.isnan(number) or row.expert == number]
        steps, losses = [row.step for row in trained], [row.loss for row in trained]
        means = [sum(losses[max(0, i - _WINDOW + 1) : i + 1]) / min(i + 1, _WINDOW) for i in range(len(losses))]
        label = f"mean of {_WINDOW}" + ("" if math.isnan(number) else f", expert {number:.0f}")
        axes.plot(steps, means, linewidth=1.8, label=label)
    validated = [row for row in rows if not math.isnan(row.val_loss)]
    if validated:
        steps, losses = [row.step for row in validated], [row.val_loss for row in validated]
        axes.plot(steps, losses, "o-", color="C3", markersize=3.5, linewidth=1.2, label="validation")
    axes.set(xlabel="step", ylabel="loss (velocity, mean squared error)")
    show_whole(axes)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    with writing_new(picture) as path:
        figure.savefig(path, dpi=120)


@dataclass
class ProgressBar(Watcher):
    """Show step, loss, step time and tokens/s, and the last validation loss: a progress bar on a terminal.

    Without a terminal, a line every `every` steps, after each validation, and after at most a minute and one step.

    Args:
        total: number of steps of the run.
        start: number of steps completed before this process.
        every: steps between two lines without a terminal.
    """

    total: int
    start: int = 0
    every: int = 50

    def __post_init__(self) -> None:
        self._console = Console()
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=self.total, completed=self.start, values="")
        self._validated, self._printed_s = "", time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    @override
    def watch(self, report: StepReport) -> None:
        values = f"loss {report.loss:.4f}  {report.step_time_s * 1000:.0f} ms  {report.tokens_per_s:,.0f} tokens/s"
        is_validated = not math.isnan(report.val_loss)
        if is_validated:
            self._validated = f"  val_loss {report.val_loss:.4f}"
        self._bar.update(self._task, completed=report.step, values=f"{values}{self._validated}")
        waited_s = time.monotonic() - self._printed_s
        due = report.step % self.every == 0 or report.step == self.total or is_validated or waited_s >= _LINE_S
        if due and not self._console.is_terminal:
            print(f"step {report.step}/{self.total}  {values}{self._validated}", flush=True)
            self._printed_s = time.monotonic()
