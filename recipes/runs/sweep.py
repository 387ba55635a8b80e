"""Record each job of a Hydra multirun; at the end write a table, a CSV file and a plot of all jobs.

Each job starts fresh, because its ranks are new processes; only the outcomes are kept between jobs. Imports no torch.
"""

from __future__ import annotations

import csv
import json
import math
import os
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.table import Table
from typing_extensions import override

from lightning_cp.files import PRIVATE, writing_new
from lightning_cp.launch.job import Result
from lightning_cp.launch.rank import is_first, launcher_env
from lightning_cp.recipes.runs import slurm
from lightning_cp.recipes.runs.outcome import Outcome, Status, delete_outcomes, differing, read_outcomes
from lightning_cp.recipes.settings.table import SettingsError
from lightning_cp.recipes.terminal import console, print_error, printable, rich_text
from lightning_cp.recipes.training.metrics import read_metric_rows, show_whole

RESOLVED = "resolved.yaml"  # in the run's .hydra folder: the fully resolved configuration
_LAST_ROWS = 25  # without validation, the objective is the mean loss of these last rows of metrics.csv


def in_sweep() -> bool:
    """Return True if this job is part of a multirun."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def job_number() -> int | None:
    """Return the number of this job in its multirun, or None for a single run."""
    return int(HydraConfig.get().job.num) if in_sweep() else None


def check_launcher() -> None:
    """Reject a sweep launcher for a single run: Hydra would ignore it. Raises: SettingsError."""
    chosen = HydraConfig.get().runtime.choices.get("launcher") if HydraConfig.initialized() else None
    if chosen is not None and not in_sweep():
        raise SettingsError(
            f"launcher={chosen} works in sweeps only: add -m (also for a single job), or leave launcher out"
        )


def check_folder(run_dir: Path) -> None:
    """Reject a `run_dir` set for a sweep: all its jobs would use the same folder. Raises: SettingsError."""
    if in_sweep() and run_dir.absolute() != Path(HydraConfig.get().runtime.output_dir).absolute():
        raise SettingsError(
            f"run_dir={run_dir} cannot be set in a sweep, where each job has its own folder: set hydra.sweep.dir"
        )


def this_sweep() -> Path:
    """Return the absolute folder of this job's multirun."""
    return Path(HydraConfig.get().sweep.dir).absolute()


def is_sweep_stopped(sweep: Path) -> bool:
    """Return True if an earlier job of the sweep failed."""
    return any(outcome.status is Status.FAILED for outcome in read_outcomes(sweep))


def record_job(config: DictConfig, result: Result | None, started: float) -> Outcome:
    """Write and return the outcome of a job.

    Args: result: result of the job, None if it was skipped. started: `time.monotonic()` before the job.
    """
    hydra = HydraConfig.get()
    run = Path(hydra.runtime.output_dir)
    ran = result is not None and result.began
    metrics, timings, resolved = run / "metrics.csv", run / "timings.json", run / ".hydra" / RESOLVED
    rows = list(read_metric_rows(metrics)) if ran and _is_newer(metrics, started) else []
    times = json.loads(timings.read_text("utf-8")) if ran and _is_newer(timings, started) else {}
    resolved_config = OmegaConf.load(resolved) if ran and resolved.is_file() else config
    failure = None if result is None else result.failure
    status = Status.SKIPPED if result is None else Status.FINISHED if failure is None else Status.FAILED
    finished = rows if status is Status.FINISHED else []
    losses = [row["loss"] for row in finished[-_LAST_ROWS:]]
    validated = [row["val_loss"] for row in finished if not math.isnan(row.get("val_loss", math.nan))]
    outcome = Outcome(
        job=int(hydra.job.num),
        overrides=list(hydra.overrides.task),
        degrees={key: _degree(resolved_config, key) for key in ("data_parallel", "ring", "ulysses")},
        status=status,
        message="" if failure is None else " ".join(failure.message.split()),
        exit_code=0 if result is None else result.exit_code,
        steps=int(rows[-1]["step"]) if rows else 0,
        loss=statistics.fmean(losses or [math.nan]),
        val_loss=min(validated, default=math.nan),
        step_time_s=statistics.median([row["step_time_s"] for row in rows] or [math.nan]),
        tokens_per_s=statistics.median([row["tokens_per_s"] for row in rows] or [math.nan]),
        call_s=times.get("fastest_call", math.nan),
        seconds=time.monotonic() - started,
        folder=str(run.absolute()),
    )
    outcome.write(this_sweep())
    return outcome


def summarise_sweep(sweep: Path) -> int:
    """Write `sweep.csv` and `sweep.png`, and print a table. Returns: exit code, 1 if a job failed or none was found."""
    outcomes = read_outcomes(sweep)
    if not outcomes:
        print_error(f"no job of the sweep has an outcome in {sweep}")
        return 1
    with writing_new(sweep / "sweep.csv", mode=PRIVATE) as table, table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(asdict(outcomes[0]))
        for outcome in outcomes:
            cells = asdict(outcome) | {"overrides": " ".join(outcome.overrides), "degrees": _degrees_text(outcome)}
            writer.writerow(cells.values())
    drawn = any(outcome.steps for outcome in outcomes)
    if drawn:
        draw_sweep(outcomes, sweep / "sweep.png")
    console(width=160).print(_table(outcomes))
    failed = [outcome for outcome in outcomes if outcome.status is Status.FAILED]
    for outcome in failed:
        print(printable(f"job {outcome.job} failed: {outcome.message}"))
    print(printable(f"{sweep}\n  sweep.csv{'  sweep.png' if drawn else ''}"), flush=True)
    return 1 if failed else 0


class SweepSummary(Callback):
    """Hydra callback: delete the outcomes of an earlier sweep in the same folder, and summarise this one at its end."""

    @override
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if not is_first(launcher_env(os.environ)):
            return
        delete_outcomes(Path(config.hydra.sweep.dir))
        try:
            slurm.check_sweep(config)
        except SettingsError as error:
            print_error(error)
            raise SystemExit(2) from None

    @override
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if not is_first(launcher_env(os.environ)):
            return
        try:
            exit_code = summarise_sweep(Path(config.hydra.sweep.dir).absolute())
        except OSError as error:  # Hydra would only warn
            print_error(error)
            exit_code = 1
        if exit_code:
            raise SystemExit(exit_code)


def _is_newer(path: Path, started: float) -> bool:
    """Return True if a file was written after `started`, a `time.monotonic()` value."""
    started_s = time.time() - (time.monotonic() - started)
    return path.is_file() and path.stat().st_mtime >= started_s - 1


def _degree(config: Any, key: str) -> Any:
    try:
        return OmegaConf.select(config, key)
    except OmegaConfBaseException:  # unresolvable interpolation, already reported as an error
        return "?"


def draw_sweep(outcomes: list[Outcome], picture: Path) -> None:
    """Plot the loss curves of all jobs in one PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: no state, no display

    by_job = {outcome.job: settings for outcome, settings in zip(outcomes, differing(outcomes), strict=True)}
    trained = [outcome for outcome in outcomes if outcome.steps]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    curves: Any = figure.subplots()
    best = min((x for x in trained if not math.isnan(x.objective)), key=lambda x: x.objective, default=None)
    for i, outcome in enumerate(trained):
        rows = list(read_metric_rows(Path(outcome.folder) / "metrics.csv"))
        steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
        label = f"{outcome.job}: {shorten(by_job[outcome.job], 50, placeholder=' …') or 'the same settings'}"
        label += " (failed)" if outcome.status is Status.FAILED else " (best)" if outcome is best else ""
        color, style = f"C{i % 10}", ("-", "--", "-.", ":")[(i + i // 10) % 4]  # equal curves overlap
        width, order = (2.6, 3) if outcome is best else (1.2, 2)
        curves.plot(steps, losses, style, color=color, lw=width, zorder=order, label=label)
        validated = [(row["step"], row["val_loss"]) for row in rows if not math.isnan(row.get("val_loss", math.nan))]
        if validated:
            curves.plot(*zip(*validated), "o", color=color, ms=4 if outcome is best else 3, mec="black", mew=0.5)
    has_dots = any(not math.isnan(outcome.val_loss) for outcome in trained)
    curves.set(xlabel="step", ylabel="loss (dots: validation)" if has_dots else "loss")
    curves.xaxis.get_major_locator().set_params(integer=True)
    show_whole(curves)
    curves.legend(frameon=False, fontsize=8)
    curves.grid(alpha=0.3)
    with writing_new(picture):
        figure.savefig(picture, dpi=110)


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(title="sweep", title_justify="left")
    for name in ("job", "settings", "degrees", "status"):
        table.add_column(name)
    for name in ("steps", "loss", "val_loss", "ms/step", "tokens/s", "s/call", "seconds"):
        table.add_column(name, justify="right")
    colours = {Status.FINISHED: "green", Status.FAILED: "red", Status.SKIPPED: "yellow"}
    for outcome, settings in zip(outcomes, differing(outcomes), strict=True):
        table.add_row(
            str(outcome.job),
            rich_text(settings),
            _degrees_text(outcome),
            f"[{colours[outcome.status]}]{outcome.status}",
            str(outcome.steps),
            _shown(outcome.loss, ".4f"),
            _shown(outcome.val_loss, ".4f"),
            _shown(outcome.step_time_s * 1000, ".0f"),
            _shown(outcome.tokens_per_s, ",.0f"),
            _shown(outcome.call_s, ".2f"),
            f"{outcome.seconds:.0f}",
        )
    return table


def _degrees_text(outcome: Outcome) -> str:
    degrees = (f"{key} {value}" for key, value in outcome.degrees.items() if value not in (1, "auto"))
    return " × ".join(degrees) or "one rank"


def _shown(value: float, spec: str) -> str:
    return "–" if math.isnan(value) else format(value, spec)
