"""The scripts and commands of the pages run unchanged."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.e2e.recipe import ROOT
from tests.harness import warm

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
    """Write each Python or YAML block of a page that begins with a comment naming a file."""
    text = (ROOT / "docs" / page).read_text()
    for name, script in re.findall(r"```\w+\n# (\S+\.(?:py|yaml))\n(.*?)```", text, re.DOTALL):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(script)


def commands(text: str) -> list[list[str]]:
    """Return the commands of a text that run a recipe: its file, and the arguments."""
    lines = re.findall(
        r"^(?:\w+=\S+ )*(?:lightning-cp |python recipes/)([\w-]+)(?:\.py)?(.*)$",
        text.replace("\\\n", " "),
        re.MULTILINE,
    )
    return [[f"recipes/{name.replace('-', '_')}.py", *shlex.split(rest, comments=True)] for name, rest in lines]


def training_commands(page: str) -> list[list[str]]:
    """Return the arguments of the page's commands that train."""
    return [words for recipe, *words in commands((ROOT / "docs" / page).read_text()) if recipe == "recipes/train.py"]


def run(folder: Path, *arguments: str) -> str:
    """Run a script of the folder. Returns: its standard output."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}.", "OMP_NUM_THREADS": "1"}
    result = warm.run([sys.executable, *arguments], cwd=folder, env=environment, timeout=200)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.full
def test_own_module_gives_the_same_numbers_at_every_degree(tmp_path: Path) -> None:
    write_files("start_module.md", tmp_path)
    printed = [run(tmp_path, "compare_ranks.py", str(ring)) for ring in (1, 2, 3)]
    numbers = [re.findall(r"loss (\S+), norm of the weights (\S+)", text) for text in printed]
    assert numbers[0] == numbers[1] == numbers[2]
    assert len(numbers[0]) == 1


@pytest.mark.full
def test_own_noise_differs_between_data_groups_only(tmp_path: Path) -> None:
    write_files("start_module.md", tmp_path)
    write_files("data.md", tmp_path)
    (tmp_path / "two_groups.py").write_text(TWO_GROUPS)
    drawn = re.findall(r"drawn (\d+) (\S+)", run(tmp_path, "two_groups.py"))
    assert len(drawn) == 4
    for numbers in zip(*drawn, strict=True):  # of the group's generator, and of the global state: equal in a group only
        assert sorted(numbers.count(number) for number in set(numbers)) == [2, 2]
    assert len(set(drawn)) == 2


@pytest.mark.full
def test_own_data_trains_and_is_not_judged_by_the_classifier_of_digits(tmp_path: Path) -> None:
    write_files("data.md", tmp_path)
    (command,) = training_commands("data.md")
    printed = run(tmp_path, str(ROOT / "recipes/train.py"), *command, "max_steps=2", "batch_size=4")
    assert "Trained 2 steps" in printed
    assert "classifier" not in printed


@pytest.mark.full
@pytest.mark.parametrize("flavour", ["fabric", "pytorch"])
def test_an_own_hydra_project_has_the_same_losses_at_every_degree(flavour: str, tmp_path: Path) -> None:
    write_files("start_module.md", tmp_path)
    write_files("training.md", tmp_path)
    printed = run(tmp_path, "app.py", "-m", "strategy.ring=1,2,3", f"flavour={flavour}", "steps=2")
    found = dict(re.findall(r"ring (\d): last loss (\S+)", printed))
    assert set(found) == {"1", "2", "3"}
    assert float(found["2"]) == pytest.approx(float(found["1"]), abs=2e-6)
    assert float(found["3"]) == pytest.approx(float(found["1"]), abs=2e-6)


@pytest.mark.full
@pytest.mark.parametrize("number", range(2))
def test_sweeps_of_the_docs_run(number: int, tmp_path: Path) -> None:
    sweeps = [command for command in training_commands("mixtures_and_sweeps.md") if "-m" in command]
    command = [one for one in sweeps[number] if not one.startswith(("max_steps=", "ring="))]
    quick = ["ring=1", "max_steps=2", "batch_size=4", "sampling.num_samples=10"]
    quick += ["hydra.sweeper.n_trials=2"] if "hydra/sweeper=optuna" in command else []
    command = [one for one in command if not one.startswith("hydra.sweeper.n_trials=")]
    printed = run(tmp_path, str(ROOT / "recipes/train.py"), *command, *quick)
    assert "sweep.csv" in printed
    assert ("hydra/sweeper=optuna" in command) == any(tmp_path.rglob("optimization_results.yaml"))


@pytest.mark.full
def test_the_script_with_a_sparse_mask_runs_on_two_ranks(tmp_path: Path) -> None:
    write_files("sparse_and_causal.md", tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "sparse_attention.py"]
    done = warm.run_ranks(2, command, env=environment, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank}: (1, 256, 4, 32), 0.56 of the work of dense attention" in done.stdout


@pytest.mark.full
def test_the_script_with_packed_samples_trains_on_two_ranks(tmp_path: Path) -> None:
    write_files("sparse_and_causal.md", tmp_path)
    printed = run(tmp_path, "train_packed.py")
    assert "Epoch 0" in printed


def test_code_about_sparse_masks_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/sparse_and_causal.md").read_text()
    blocks = re.findall(r"```python\n(?!# \S+\.py)(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        exec(block, values := {})
        if "imbalance" in block:
            assert capsys.readouterr().out.split() == [f"{25 / 17}", "1.0"]
            assert values["restored"].equal(values["x"][:, values["order"].argsort()])
