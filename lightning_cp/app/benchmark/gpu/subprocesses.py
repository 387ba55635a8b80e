"""Stages that start other programs: the GPU tests, and the main job on one GPU."""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from lightning_cp.app.benchmark.gpu.results import Check, ResultTable, StageResult


def run_tests(config: DictConfig, result: StageResult, save: Callable[[], None]) -> None:
    """Run the files `config.tests.files` with pytest. One check for each test that ran."""
    rows = []
    for file in config.tests.files:
        with tempfile.TemporaryDirectory(prefix="lightning_cp_") as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", "-q", "-m", "full or not full", f"--junitxml={report}", file]
            done = subprocess.run(command, check=False)
            if not report.is_file():
                result.checks.append(Check(file, f"pytest ended with exit code {done.returncode}", "passes", False))
                continue
            outcomes = [_outcome(case) for case in ElementTree.parse(report).iter("testcase")]
        counts = [sum(outcome == kind for _, outcome, _ in outcomes) for kind in ("passed", "failed", "skipped")]
        rows.append([file, *map(str, counts)])
        passed, failed, _ = counts
        value = f"{passed} passed, {failed} failed"
        needed = config.device == "cuda"
        result.checks.append(
            Check(file, value, "all pass", not failed and passed > 0) if needed else Check(file, value)
        )
        for name, outcome, message in outcomes:
            if outcome == "failed":
                result.checks.append(Check(name, message, "passes", False))
        save()
    result.tables.append(ResultTable("GPU tests", ["file", "passed", "failed", "skipped"], rows))


def _outcome(case: ElementTree.Element) -> tuple[str, str, str]:
    """Name, "passed", "failed" or "skipped", and the first line of the message."""
    for kind, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(kind)
        if found is not None:
            return case.get("name", ""), outcome, (found.get("message") or "").split("\n")[0][:200]
    return case.get("name", ""), "passed", ""


def run_main_job(config: DictConfig, result: StageResult, save: Callable[[], None]) -> None:
    """Train the recipe's default model for some steps, alone and through the strategy, and compare the losses."""
    recipe = Path(__file__).parents[4] / "recipes" / "train.py"
    losses: dict[str, list[float]] = {}
    rows = []
    for strategy in ("single", "cp"):
        with tempfile.TemporaryDirectory(prefix="lightning_cp_") as folder:
            command = [sys.executable, str(recipe), f"strategy={strategy}", f"accelerator={config.device}", "devices=1"]
            command += [f"max_steps={config.main_job.steps}", "progress=false", f"hydra.run.dir={folder}/run"]
            began = time.monotonic()
            done = subprocess.run([*command, *config.main_job.overrides], check=False)
            seconds = time.monotonic() - began
            metrics = Path(folder) / "run" / "metrics.csv"
            if done.returncode or not metrics.is_file():
                name = f"recipes/train.py strategy={strategy}"
                result.checks.append(Check(name, f"exit code {done.returncode}", "exit code 0", False))
                continue
            with metrics.open(encoding="utf-8") as file:
                losses[strategy] = [float(row["loss"]) for row in csv.DictReader(file)]
        rows.append([strategy, str(config.main_job.steps), f"{losses[strategy][-1]:.4f}", f"{seconds:.0f}"])
    if len(losses) == 2:
        apart = max(abs(a - b) / abs(a) for a, b in zip(losses["single"], losses["cp"], strict=True))
        first = abs(losses["single"][0] - losses["cp"][0]) / abs(losses["single"][0])
        result.checks.append(
            Check("loss of the first step, cp and single", f"{first:.1e} apart", "≤ 1e-4", first <= 1e-4)
        )
        result.checks.append(Check("loss of all steps, cp and single", f"at most {apart:.1e} apart"))
    result.tables.append(ResultTable("Main job", ["strategy", "steps", "last loss", "seconds"], rows))
    save()
