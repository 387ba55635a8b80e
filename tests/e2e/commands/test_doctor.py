"""recipes/doctor.py shows this machine, tests every mode, and prints a verdict."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.recipe import ROOT
from tests.harness import warm

DOCTOR = ROOT / "recipes" / "doctor.py"


def _ran(script: Path, *arguments: str, cold: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), *arguments]
    if not cold:
        return warm.run(command, env=environment, timeout=300)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.full
def test_the_doctor_tries_every_mode_and_is_content() -> None:
    told = _ran(DOCTOR, "timeout=120", cold=True)
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.count("exact") == 7
    for word in ("ring allgather", "ring alltoall", "Ulysses", "torch 2", "gloo", "auto is flash", "everything works"):
        assert word in told.stdout


def _changed(folder: Path, text: str, other: str) -> Path:
    """A doctor with another text in its code, as a script."""
    script = folder / "doctor.py"
    code = (ROOT / "recipes" / "doctor.py").read_text()
    assert code.count(text) == 1
    script.write_text(code.replace(text, other))
    return script


def _sleepy(folder: Path, addition: str = "") -> Path:
    """A doctor; all its ranks but the first sleep."""
    text = "generator = torch.Generator()"
    return _changed(folder, text, f"if rank:\n        time.sleep(60)\n    {addition}\n    {text}")


def test_a_doctor_whose_time_runs_out_gives_no_verdict(tmp_path: Path) -> None:
    told = _ran(_sleepy(tmp_path), "timeout=1")
    assert told.returncode == 3, told.stdout + told.stderr
    assert "something fails" not in told.stdout
    assert told.stdout.count("ranks were still running after timeout=1 seconds") == 2
    assert "On a busy machine use timeout=120" in told.stdout


@pytest.mark.full
def test_a_problem_counts_more_than_the_time(tmp_path: Path) -> None:
    """Rank 0 of 2 fails; with 3 ranks the time runs out."""
    failing = 'if rank == 0 and world == 2:\n        raise LookupError("it fails")'
    told = _ran(_sleepy(tmp_path, failing), "timeout=30")
    assert told.returncode == 1, told.stdout + told.stderr
    assert "problem: 2 ranks: LookupError: it fails" in told.stdout
    assert "something fails" in told.stdout


def test_a_bad_argument_is_one_line() -> None:
    given = "timeout=soon"
    told = _ran(DOCTOR, given)
    assert told.returncode == 2
    (line,) = told.stderr.splitlines()
    assert line.startswith(f"error: {given} is not valid")
    assert told.stdout == ""


@pytest.mark.full
def test_the_doctor_finds_what_is_wrong(tmp_path: Path) -> None:
    text = "out = attend(*inputs)"
    ill = _changed(tmp_path, text, f"{text} * (1 + (not transposed))")
    told = _ran(ill, "timeout=120")
    assert told.returncode == 1
    assert told.stdout.count("problem:") == 6
    assert "something fails" in told.stdout
