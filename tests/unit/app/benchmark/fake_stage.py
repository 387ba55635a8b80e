"""A stage of measurements a, b, c and d that takes no time: `python fake_stage.py NAME SETTINGS.yaml RESULTS.json`.

The folder of RESULTS.json gets `ran.txt`, the measurements that were begun. If it has a file "crash", b aborts; if it
has a file "hang", d writes its process's id to `pid.txt` and does not end.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path

from lightning_cp.app.benchmark.gpu.results import Check, StageResult, read_results, run_measurements, write_results
from lightning_cp.launch.channel import end_with_launcher


def _measure(folder: Path, name: str, result: StageResult) -> None:
    with (folder / "ran.txt").open("a") as file:
        file.write(name)
    if name == "b" and (folder / "crash").exists():
        print("out of order", flush=True)
        os.abort()
    if name == "d" and (folder / "hang").exists():
        (folder / "pid.partial").write_text(str(os.getpid()))
        (folder / "pid.partial").rename(folder / "pid.txt")
        time.sleep(600)
    result.checks.append(Check(name, "measured"))


def main(name: str, path: Path) -> None:
    """Run what is left of the stage."""
    stored = read_results(path)
    measurements = [(letter, functools.partial(_measure, path.parent, letter)) for letter in "abcd"]
    run_measurements(measurements, stored[name], lambda: write_results(stored, path))


if __name__ == "__main__":
    end_with_launcher(sys.stdin.fileno())
    main(sys.argv[1], Path(sys.argv[3]))
