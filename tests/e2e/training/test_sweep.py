"""Multiruns: new ranks for every job, failures that do not affect other jobs, and the files at the end."""

from __future__ import annotations

import csv
import math
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf

from lightning_cp.files import PRIVATE
from lightning_cp.recipes.runs.outcome import Outcome, Status, read_outcomes
from tests.e2e.recipe import ROOT, SMALL, started
from tests.e2e.training.sweeping import HANG_S
from tests.harness import warm

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d")
SWEEPING = Path(__file__).with_name("sweeping.py")


def sweep(
    *overrides: str, folder: Path, script: Path = SWEEPING, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, str(script), "-m", f"hydra.sweep.dir={folder}", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if not launcher:
        return warm.run(command, env=environment, cwd=folder.parent, timeout=200)
    return subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True, text=True, timeout=200)


def statuses(outcomes: list[Outcome]) -> list[Status]:
    return [outcome.status for outcome in outcomes]


@pytest.mark.full
def test_jobs_of_changing_worlds_are_each_a_fresh_start(tmp_path: Path) -> None:
    folder, worlds, jobs = tmp_path / "sweep", (2, 3, 1), 3
    ran = sweep("strategy=cp", f"ring={','.join(map(str, worlds))}", folder=folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    outcomes = read_outcomes(folder)
    assert statuses(outcomes) == [Status.FINISHED] * jobs
    assert [outcome.tokens_per_s for outcome in outcomes] == [100 * ring for ring in worlds]
    assert [Path(outcome.folder) for outcome in outcomes] == [folder / str(job) for job in range(jobs)]
    with (folder / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["overrides"] for row in rows] == [f"strategy=cp ring={ring}" for ring in worlds]
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "sweep.csv" in ran.stdout
    assert all(f"ring={ring}" in ran.stdout for ring in (1, 2, 3))
    private = [folder / "multirun.yaml", folder / "sweep.csv", *folder.glob("*/.hydra/*")]
    assert len(private) == 2 + jobs * 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {PRIVATE}


@pytest.mark.full
def test_a_failed_job_affects_no_other_job_and_is_listed_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    faults = "raise_1,kill_0,none"
    ran = sweep("strategy=cp", "ring=2", f"+fault={faults}", "ulysses=1,7", folder=folder)
    assert ran.returncode == 1
    outcomes = read_outcomes(folder)
    assert statuses(outcomes) == [Status.FAILED] * 4 + [Status.FINISHED, Status.FAILED]
    told = [outcome.message for outcome in outcomes]
    assert told[0] == "ZeroDivisionError: rank 1 fails"
    assert told[2] == "rank 0 was ended by signal 9 (SIGKILL)"
    assert all("ulysses=7" in message for message in told[1::2])
    assert all(message in ran.stdout for message in told if message)
    assert max(outcome.seconds for outcome in outcomes) < HANG_S
    assert math.isnan(outcomes[0].loss)


@pytest.mark.full
def test_bad_settings_of_one_job_affect_no_other_and_the_folder_may_exist(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "outcome.json").write_text("keep")
    first = sweep("strategy=cp", "ring=1", folder=folder)
    assert first.returncode == 0, first.stdout + first.stderr
    again = sweep("strategy=cp", "ring=99,${nope},1", folder=folder)
    assert again.returncode == 1
    assert "Traceback" not in again.stderr
    outcomes = read_outcomes(folder)
    assert statuses(outcomes) == [Status.FAILED, Status.FAILED, Status.FINISHED]
    assert [outcome.steps for outcome in outcomes] == [0, 0, 3]  # nothing of the first sweep
    assert (folder / "mine" / "outcome.json").read_text() == "keep"


def test_one_folder_for_all_jobs_is_refused(tmp_path: Path) -> None:
    ran = sweep("strategy=cp", "ring=1,2", f"run_dir={tmp_path / 'same'}", folder=tmp_path / "sweep")
    assert ran.returncode == 1
    outcomes = read_outcomes(tmp_path / "sweep")
    assert all("cannot be set in a sweep, where each job has its own folder" in outcome.message for outcome in outcomes)
    assert len(outcomes) == 2


@pytest.mark.full
def test_a_sweep_can_stop_at_the_first_failure(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    ran = sweep("strategy=cp", "sweep.on_error=stop", "+fault=none,raise_0,kill_0", folder=folder)
    assert ran.returncode == 1
    assert statuses(read_outcomes(folder)) == [Status.FINISHED, Status.FAILED, Status.SKIPPED]


@pytest.mark.full
def test_an_interrupt_ends_the_sweep_and_every_rank(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    overrides = (f"hydra.sweep.dir={folder}", "strategy=cp", "ring=2", "+fault=none,hang,none", "-m")
    with started(*overrides, folder=tmp_path / "run", script=SWEEPING) as process:
        deadline = time.monotonic() + 120
        while not (folder / "1" / "metrics.csv").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        ranks = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=120)
        _, alive = psutil.wait_procs(ranks, timeout=60)
    assert alive == []
    assert process.returncode == 128 + signal.SIGTERM, stderr
    assert statuses(read_outcomes(folder)) == [Status.FINISHED, Status.FAILED]
    assert "sweep.csv" in stdout


@pytest.mark.full
def test_under_torchrun_a_changing_world_size_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    ran = sweep("strategy=cp", "ring=1,2,3,2", folder=folder, launcher=TORCHRUN)
    assert ran.returncode == 1
    outcomes = read_outcomes(folder)
    assert statuses(outcomes) == [Status.FINISHED, Status.FINISHED, Status.FAILED, Status.FINISHED]
    assert [outcome.tokens_per_s for outcome in outcomes[:2]] == [200, 200]
    assert "ring=3 × ulysses=1 = 3 must divide the 2 ranks that torchrun started" in outcomes[2].message
    assert ran.stdout.count("sweep.csv") == 1


@pytest.mark.full
def test_optuna_sees_the_lowest_validation_loss_of_each_job(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    optuna = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.max_failure_rate=1.0")
    drawn = ("strategy=cp", "ring=choice(1,2)", "optim.lr=interval(0.1,0.9)", "+validated=true")
    ran = sweep(*optuna, *drawn, folder=folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    outcomes = read_outcomes(folder)
    assert len(outcomes) == 4
    results = OmegaConf.load(folder / "optimization_results.yaml")
    rates = [OmegaConf.from_dotlist(outcome.overrides).optim.lr for outcome in outcomes]
    assert results.best_value == pytest.approx(5 - max(rates))
    assert results.best_params["optim.lr"] == pytest.approx(max(rates))  # the lowest loss has the lowest rate


@pytest.mark.full
def test_the_recipe_itself_trains_in_a_sweep(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    recipe = ROOT / "recipes" / "train.py"
    ran = sweep(*SMALL, "strategy=cp", "max_steps=2", "ring=1,2", folder=folder, script=recipe)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    first, second = read_outcomes(folder)
    assert first.loss == pytest.approx(second.loss, rel=1e-4)
    assert (folder / "1" / "samples" / "final.png").is_file()
