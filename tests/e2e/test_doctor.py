"""The doctor looks at this machine, tries every mode, and comes to a verdict."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.recipe import ROOT

DOCTOR = ROOT / "recipes" / "doctor.py"


def _ran(script: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)


def test_the_doctor_tries_every_mode_and_is_content() -> None:
    told = _ran(DOCTOR)
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.count("exact") == 7
    for word in ("ring allgather", "ring alltoall", "Ulysses", "torch 2", "gloo", "auto is flash", "all is well"):
        assert word in told.stdout


def test_the_doctor_does_not_wait_for_ever(tmp_path: Path) -> None:
    ill = tmp_path / "doctor.py"
    sleepy = "if rank:\n        time.sleep(60)\n    generator = torch.Generator()"
    ill.write_text(
        DOCTOR.read_text().replace("generator = torch.Generator()", sleepy).replace("LIMIT_S = 25", "LIMIT_S = 6")
    )
    told = _ran(ill)
    assert told.returncode == 1
    assert "something is wrong" in told.stdout
    assert told.stdout.count("problem:") == 2


@pytest.mark.full
def test_the_doctor_finds_what_is_wrong(tmp_path: Path) -> None:
    ill = tmp_path / "doctor.py"
    ill.write_text(
        DOCTOR.read_text().replace("out = attend(*inputs)", "out = attend(*inputs) * (1 + (not transposed))")
    )
    told = _ran(ill)
    assert told.returncode == 1
    assert told.stdout.count("problem:") == 6
    assert "something is wrong" in told.stdout
