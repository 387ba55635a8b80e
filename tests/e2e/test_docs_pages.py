"""The scripts of the docs pages about own code run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.recipe import ROOT

TWO_GROUPS = """
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning_cp.pytorch import ContextParallelStrategy
from my_module import clips
from noise_per_group import OwnNoise
from torch.utils.data import DataLoader

class Recorded(OwnNoise):
    def on_train_batch_end(self, *_):
        print(f"drawn {self.generator.get_state().sum().item()} {torch.rand(()).item()}", flush=True)

seed_everything(0)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = Trainer(max_steps=1, devices=4, strategy=ContextParallelStrategy(ring=2), **quiet)
trainer.fit(Recorded(), DataLoader(clips(), batch_size=2))
"""


def write_files(page: str, folder: Path) -> None:
    """Write each Python block of a page that begins with a comment naming a file."""
    text = (ROOT / "docs" / page).read_text()
    for name, script in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(script)


def run(folder: Path, *arguments: str) -> str:
    """Run a script of the folder. Returns: its standard output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.full
def test_own_module_gives_the_same_numbers_at_every_degree(tmp_path: Path) -> None:
    write_files("own_module.md", tmp_path)
    printed = [run(tmp_path, "compare_ranks.py", str(ring)) for ring in (1, 2, 3)]
    numbers = [re.findall(r"loss (\S+), norm of the weights (\S+)", text) for text in printed]
    assert numbers[0] == numbers[1] == numbers[2]
    assert len(numbers[0]) == 1


@pytest.mark.full
def test_own_noise_differs_between_data_groups_only(tmp_path: Path) -> None:
    write_files("own_module.md", tmp_path)
    (tmp_path / "two_groups.py").write_text(TWO_GROUPS)
    drawn = re.findall(r"drawn (\d+) (\S+)", run(tmp_path, "two_groups.py"))
    assert len(drawn) == 4
    states = [state for state, _ in drawn]
    assert sorted(states.count(state) for state in set(states)) == [2, 2]
    assert len({other for _, other in drawn}) == 1  # the global states stay equal: nothing else was drawn from
