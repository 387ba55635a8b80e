"""Run recipes/train.py as a user does, in a separate folder, and read its files."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from lightning_cp.recipes.training.loop import StepReport
from lightning_cp.recipes.training.records import read_metrics
from tests.harness import warm

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "train.py"
SMALL = ("batch_size=12", "model.transformer.num_layers=2", "sampling.num_samples=10", "sampling.num_inference_steps=2")


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    exit_code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def rows(self) -> list[StepReport]:
        return read_metrics(self.folder / "metrics.csv")

    @property
    def losses(self) -> list[float]:
        return [row.loss for row in self.rows]


@contextmanager
def started(
    *overrides: str,
    folder: Path,
    launcher: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    script: Path = RECIPE,
    cold: bool = False,
) -> Iterator[subprocess.Popen[str]]:
    """Start the recipe. Yields: its process; processes that still run at the end of the context are killed.

    Without a launcher and without `cold` it is forked from the warm server, see `tests.harness.warm`. Each rank has one
    thread: on a busy machine, threads that wait for each other make tiny models many times slower.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = (subprocess.Popen if cold or launcher else warm.Popen)(
        [sys.executable, *launcher, str(script), f"hydra.run.dir={folder}", *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environment or {})},
        cwd=folder.parent,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run(
    *overrides: str,
    folder: Path,
    launcher: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 300,
    cold: bool = False,
) -> Finished:
    """Runs the recipe to its end."""
    with started(*overrides, folder=folder, launcher=launcher, environment=environment, cold=cold) as process:
        stdout, stderr = process.communicate(timeout=timeout_s)
        return Finished(process.returncode, stdout, stderr, folder)


def error_of(finished: Finished) -> str:
    """Return the error line of a failed run. Fails if stderr has anything else that looks like an error."""
    assert finished.exit_code != 0
    assert "Traceback" not in finished.stderr
    (line,) = [line for line in finished.stderr.splitlines() if "rror" in line]
    return line


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The ranks that the recipe's process started, in the order of their start."""
    children = psutil.Process(process.pid).children()
    return sorted(children, key=lambda child: (child.create_time(), child.pid))
