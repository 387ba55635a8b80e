"""Stage `tests`: the GPU tests of the repository, by pytest."""

from __future__ import annotations

import functools
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from lightning_cp.app.benchmark.gpu.results import Check, Measurement, StageResult
from lightning_cp.checkpoint.folder import temporary_folder

REPOSITORY = Path(__file__).parents[4]


def run_tests(config: DictConfig) -> Iterator[Measurement]:
    """Run the files `config.tests.files`, relative to the repository. Adds one check per file and per failed test."""
    for file in config.tests.files:
        yield file, functools.partial(_run_file, file, config.device == "cuda")


def _run_file(file: str, must_pass: bool, result: StageResult) -> None:
    """Run one test file. Args: must_pass: at least one test must pass."""
    with temporary_folder() as folder:
        report = folder / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "-m", "full or not full", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *options, file]
        completed = subprocess.run(command, check=False, cwd=REPOSITORY, stdin=subprocess.DEVNULL)
        if not report.is_file():
            result.checks.append(Check(file, f"pytest ended with exit code {completed.returncode}", "passes", False))
            return
        outcomes = [_outcome(case) for case in ElementTree.parse(report).iter("testcase")]
    passed, failed, skipped = (
        sum(outcome == kind for _, outcome, _ in outcomes) for kind in ("passed", "failed", "skipped")
    )
    result.add_row("GPU tests", ["file", "passed", "failed", "skipped"], [file, *map(str, (passed, failed, skipped))])
    value = f"{passed} passed, {failed} failed"
    result.checks.append(Check(file, value, "all pass", not failed and passed > 0) if must_pass else Check(file, value))
    for name, outcome, message in outcomes:
        if outcome == "failed":
            result.checks.append(Check(name, message, "passes", False))


def _outcome(case: ElementTree.Element) -> tuple[str, str, str]:
    """Return the name, the outcome ("passed", "failed" or "skipped") and the first line of the message."""
    for kind, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        element = case.find(kind)
        if element is not None:
            return case.get("name", ""), outcome, (element.get("message") or "").split("\n")[0][:200]
    return case.get("name", ""), "passed", ""
