"""A stage of measurements a, b, c and d that takes no time, to be run by pytest with the plugin of the stages.

The folder of the results gets `ran.txt`, the measurements that were begun. If it has a file "crash", b aborts and c
raises an error; if it has a file "hang", d writes its process's id to `pid.txt` and does not end.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lightning_cp.recipes.benchmarks.gpu.results import Check, Result


@pytest.mark.parametrize("measure", "abcd")
def test_measurement(measure: str, result: Result, request: pytest.FixtureRequest) -> None:
    folder = Path(request.config.getoption("results")).parent
    with (folder / "ran.txt").open("a") as file:
        file.write(measure)
    result.add_row("table", ["column"], [measure])
    if (folder / "crash").exists():
        if measure == "b":
            print("out of order", flush=True)
            os.abort()
        assert measure != "c", "broken"
    if measure == "d" and (folder / "hang").exists():
        (folder / "pid.partial").write_text(str(os.getpid()))
        (folder / "pid.partial").rename(folder / "pid.txt")
        time.sleep(600)
    result.checks.append(Check(measure, "measured"))
