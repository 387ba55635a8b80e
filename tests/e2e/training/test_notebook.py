"""Ranks from the cells of a notebook: both strategies, under the Trainer and Fabric."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.recipe import ROOT


@pytest.mark.full
def test_cells_train_on_two_ranks_and_the_weights_come_back(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    environment.pop("OMP_NUM_THREADS", None)  # as in a notebook: forked ranks must not wait for threads that are gone
    script = Path(__file__).with_name("notebook.py")
    ran = subprocess.run(
        [sys.executable, str(script)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=180
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    (line,) = (line for line in ran.stdout.splitlines() if line.startswith("REPORT "))
    report: dict[str, Any] = json.loads(line.removeprefix("REPORT "))
    for kind in ("cp", "cp_fsdp"):
        assert report[f"one rank {kind}"] == "<class 'NoneType'>"
        assert report[f"trainer {kind}"] < 1e-5
        assert report[f"logged {kind}"] > 0
        for count in (1, 2):
            loss, world, shape = report["fabric"][f"{kind} {count}"]
            assert (world, shape) == (count, [count, 1])
            assert abs(loss - report["fabric"]["cp 1"][0]) < 1e-5
    assert "start_method='popen' cannot start 2 ranks from a notebook" in report["popen"]
    assert "Restart the kernel" in report["cuda"]
