"""The scripts of docs/post_training run and reach their aim, at every degree, and memory is counted."""

from __future__ import annotations

import csv
import os
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.recipe import ROOT
from tests.harness import warm

pytestmark = pytest.mark.full
SCRIPTS = ROOT / "docs/post_training"


def run(folder: Path, script: Path, *arguments: str) -> str:
    """Run a script in a folder. Returns: its standard output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = warm.run([sys.executable, str(script), *arguments], cwd=folder, env=environment, timeout=1500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rewards(folder: Path, *arguments: str) -> list[float]:
    """Train with rewards. Returns: those of each iteration."""
    run(folder, SCRIPTS / "flow_grpo.py", "run=digits", *arguments)
    with (folder / "rewards.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["difference"]) for row in rows] == [0.0] * len(rows), "a first ratio that is not 1"
    return [float(row["reward"]) for row in rows]


def test_flow_grpo_raises_the_reward_with_the_same_curve_at_every_degree(tmp_path: Path) -> None:
    run(tmp_path, ROOT / "recipes/train.py", "max_steps=200", "hydra.run.dir=digits", "progress=false")
    single = rewards(tmp_path)
    assert sum(single[-3:]) / 3 >= single[0] + (1 - single[0]) / 2, single
    for layout in (("devices=2", "ring=2"), ("devices=4", "ring=2")):
        assert rewards(tmp_path, *layout, "iterations=10") == pytest.approx(single[:10], abs=1e-5)


def test_dpo_prefers_correct_digits_as_in_one_process(tmp_path: Path) -> None:
    run(tmp_path, ROOT / "recipes/train.py", "max_steps=200", "hydra.run.dir=digits", "progress=false")

    def preferences(*arguments: str) -> list[list[float]]:
        run(tmp_path, SCRIPTS / "dpo.py", "run=digits", *arguments)
        with (tmp_path / "preference.csv").open() as file:
            return [[float(x) for x in row] for row in list(csv.reader(file))[1:]]

    single = preferences()
    assert [row[0] for row in single] == [0, 50, 100]
    assert single[-1][1] > 0.6, "most held-out pairs are preferred"
    assert single[-1][2] < single[0][2] - 0.02, "the loss falls below log(2)"
    assert single[-1][3] > single[0][3] + 0.1, "the reward rises"
    short = preferences("updates=2")
    for strategy in ("ContextParallelStrategy", "ContextParallelFSDPStrategy"):
        found = preferences("ring=2", "devices=2", f"strategy={strategy}", "updates=2")
        assert [row[2] for row in found] == pytest.approx([row[2] for row in short], abs=1e-4), "losses"


def test_dmd2_samples_in_two_steps_are_closer_to_the_digits(tmp_path: Path) -> None:
    run(tmp_path, ROOT / "recipes/train.py", "max_steps=1000", "hydra.run.dir=digits", "progress=false")

    def distilled(*arguments: str) -> list[tuple[float, float]]:
        printed = run(tmp_path, SCRIPTS / "dmd2.py", "run=digits", *arguments)
        rows = re.findall(r"^(\w+), (\d+) steps: distance (\S+), recognised (\S+)$", printed, re.MULTILINE)
        assert [row[:2] for row in rows] == [("teacher", "32"), ("teacher", "2"), ("generator", "2")]
        return [(float(distance), float(recognised)) for *_, distance, recognised in rows]

    single = distilled()
    assert single[2][0] < single[1][0] / 2, "the generator is closer to the digits than the teacher in as many steps"
    assert single[2][1] > 0.9
    for strategy in ("ContextParallelStrategy", "ContextParallelFSDPStrategy"):
        found = distilled("ring=2", "devices=2", f"strategy={strategy}", "updates=4")
        assert found[:2] == [pytest.approx(one, abs=0.011) for one in single[:2]]


def test_the_memory_of_a_rollout_and_a_training_step_is_counted(tmp_path: Path) -> None:
    printed = run(tmp_path, SCRIPTS / "memory.py", "model=wan_tiny", "frames=33")
    rows = re.findall(r"^\| (\d) \| (\w+) \| (\S+) \(activations (\S+)\) \| (\S+) \(activations", printed, re.MULTILINE)
    assert [(ring, weights) for ring, weights, *_ in rows] == [
        *((ring, "replicated") for ring in "124"),
        *((ring, "sharded") for ring in "24"),
    ]


def test_scripts_are_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in SCRIPTS.glob("*.py")}
    assert {"flow_grpo.py", "dpo.py", "dmd2.py", "memory.py"} <= lengths.keys()
    assert all(length < 120 for length in lengths.values()), lengths
