"""A reader's own LightningModule under the Trainer and under LightningCLI, made context-parallel as README says."""

from __future__ import annotations

import difflib
import os
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.docs.test_readme import SCRIPT
from tests.e2e.recipe import ROOT
from tests.harness import warm

PLAIN = Path(__file__).with_name("plain_trainer.py")
CLI = """
from lightning.pytorch.cli import LightningCLI
from tests.e2e.training.plain_trainer import Reader

if __name__ == "__main__":
    LightningCLI(Reader, seed_everything_default=0)
"""
OPTIONS = ("accelerator=cpu", "devices=2", "max_epochs=2", "use_distributed_sampler=false", "logger=false")
YAML = """
seed_everything: 0
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 2
  use_distributed_sampler: false
  logger: false
  strategy:
    class_path: lightning_cp.pytorch.ContextParallelStrategy
    init_args:
      ring: 1
      ulysses: 2
      timeout: 0:01:00
model:
  width: 24
"""


def losses(script: Path, *arguments: str, folder: Path | None = None, ranks: int = 1) -> tuple[list[float], str]:
    """Return the losses that a script prints, and all of its output.

    Args:
        folder: where it runs; by default, where it is.
        ranks: processes, if more than one with the variables of torchrun.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command, cwd = [sys.executable, str(script), *arguments], folder or script.parent
    if ranks == 1:
        ran = warm.run(command, env=environment, cwd=cwd, timeout=150)
    else:
        environment |= {"TORCHELASTIC_RUN_ID": "warm", "GROUP_RANK": "0"}
        ran = warm.run_ranks(ranks, command, env=environment, cwd=cwd, timeout=150)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    return [float(x) for x in re.findall(r"loss (\d+\.\d+)", ran.stdout)], said


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    found, _ = losses(PLAIN, folder=tmp_path_factory.mktemp("alone"))
    assert len(found) == 8
    assert found[-1] < found[0]
    return found


@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.default(1)
def test_two_lines_of_readme_make_a_readers_script_parallel(alone: list[float], tmp_path: Path, ranks: int) -> None:
    """One process starts the second rank itself; with two, it has the variables of torchrun."""
    snippet = SCRIPT.splitlines()
    (imported,) = (line for line in snippet if line.startswith("from lightning_cp.pytorch"))
    (called,) = (line for line in snippet if "Trainer(" in line)
    given = called[called.index("devices=") : called.rindex(")")]
    before = PLAIN.read_text()
    after = before.replace("import torch\n", f"import torch\n{imported}\n", 1).replace("devices=1", given)
    changed = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line.startswith("+ ")]
    assert len(changed) == 2
    script = tmp_path / "script.py"
    script.write_text(after)
    found, said = losses(script, ranks=ranks)
    assert found == pytest.approx(alone, rel=1e-4)
    assert "2 ranks = data 1 × ring 2 × ulysses 1; FluxTransformer2DModel: 2 blocks" in said


@pytest.mark.full
@pytest.mark.parametrize("source", ["command line", "YAML"])
def test_lightning_cli_takes_the_strategy(alone: list[float], tmp_path: Path, source: str) -> None:
    script, config = tmp_path / "cli.py", tmp_path / "reader.yaml"
    script.write_text(CLI)
    config.write_text(YAML)
    strategy = (
        "strategy=lightning_cp.pytorch.ContextParallelStrategy",
        "strategy.ring=2",
        "strategy.kernel=math",
        "strategy.start_method=fork",
    )
    options = [f"--trainer.{option}" for option in (*OPTIONS, *strategy)]
    found, said = losses(script, "fit", *(options if source == "command line" else ["--config", str(config)]))
    assert found == pytest.approx(alone, rel=1e-4)
    place = "ring 2 × ulysses 1; FluxTransformer2DModel: 2 blocks, kernel math"
    assert (place if source == "command line" else "ring 1 × ulysses 2; FluxTransformer2DModel: 2 blocks") in said
