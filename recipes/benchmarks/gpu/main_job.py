"""Stage `main_job`: recipes/train.py on one GPU, with strategy=single and with strategy=cp."""

from __future__ import annotations

import csv
import functools
import itertools
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig

from lightning_cp.checkpoint.folder import temporary_folder
from lightning_cp.recipes.benchmarks.gpu.results import Check, Measurement, Result

REPOSITORY = Path(__file__).resolve().parents[3]
STRATEGIES = ("single", "cp")
_FIRST_STEP_TOLERANCE = 1e-4


def train_on_one_gpu(config: DictConfig) -> Iterator[Measurement]:
    """Train the recipe's default model with both strategies, and compare the losses."""
    for strategy in STRATEGIES:
        yield strategy, functools.partial(_train, config, strategy)
    yield "comparison", _compare


def _train(config: DictConfig, strategy: str, result: Result) -> None:
    settings = config.main_job
    with temporary_folder() as folder:
        command = [sys.executable, str(REPOSITORY / "recipes" / "train.py"), f"strategy={strategy}", "devices=1"]
        command += [f"accelerator={config.device}", f"max_steps={settings.steps}", "progress=false"]
        command += [f"hydra.run.dir={folder}/run", *settings.overrides]
        started = time.monotonic()
        completed = subprocess.run(
            command, check=False, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        seconds = time.monotonic() - started
        print(completed.stdout)
        metrics = folder / "run" / "metrics.csv"
        if completed.returncode or not metrics.is_file():
            name = f"recipes/train.py strategy={strategy}"
            result.checks.append(Check(name, f"exit code {completed.returncode}", "exit code 0", False))
            return
        with metrics.open(encoding="utf-8") as file:
            losses = [float(row["loss"]) for row in csv.DictReader(file)]
    match = re.search(r"recognises ([\d.]+)%", completed.stdout)
    recognised = float(match.group(1)) / 100 if match else 0.0
    result.values[strategy] = losses
    result.checks += judge_training(strategy, losses, recognised, config)
    result.add_row(
        "Main job",
        ["strategy", "steps", "first loss", "last loss", "samples recognised", "seconds"],
        [strategy, str(len(losses)), f"{losses[0]:.4f}", f"{losses[-1]:.4f}", f"{recognised:.0%}", f"{seconds:.0f}"],
    )


def judge_training(strategy: str, losses: Sequence[float], recognised: float, config: DictConfig) -> Iterator[Check]:
    """Compare the losses with those on CPU, part by part, and check the fraction of recognised samples.

    Args: losses: loss of each step; at least as many as `config.main_job.expected_losses` has entries.
    """
    settings = config.main_job
    name = f"samples recognised, {strategy}"
    if settings.recognised is None:
        yield Check(name, f"{recognised:.0%}")
    else:
        yield Check(name, f"{recognised:.0%}", f"≥ {settings.recognised:.0%}", recognised >= settings.recognised)
    if settings.expected_losses is None:
        return
    count = len(settings.expected_losses)
    ends = [index * len(losses) // count for index in range(count + 1)]
    means = [statistics.fmean(losses[begin:end]) for begin, end in itertools.pairwise(ends)]
    differences = [abs(mean / expected - 1) for mean, expected in zip(means, settings.expected_losses, strict=True)]
    worst = max(differences) if all(x == x for x in differences) else float("nan")  # NaN is equal to nothing
    title = f"mean losses of {count} parts of the job, {strategy}, against CPU"
    yield Check(title, f"at most {worst:.1%} apart", f"≤ {settings.tolerance:.0%}", worst <= settings.tolerance)


def _compare(result: Result) -> None:
    """Compare the losses of both strategies; both use the same batches, noise and timesteps."""
    if not all(strategy in result.values for strategy in STRATEGIES):
        return
    single, cp = (result.values[strategy] for strategy in STRATEGIES)
    differences = [abs(a - b) / abs(a) for a, b in zip(single, cp, strict=True)]
    result.add_check("loss of the first step, cp and single", differences[0], _FIRST_STEP_TOLERANCE, "{:.1e} apart")
    result.add_check("loss of all steps, cp and single", max(differences), None, "at most {:.1e} apart")
