"""Multiruns of users' own Hydra programs: ranks run one job and never a sweep, and each job is a fresh start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.recipe import ROOT

APP = Path(__file__).with_name("hydra_app.py")


def sweep(folder: Path, *overrides: str, module: bool = False) -> subprocess.CompletedProcess[str]:
    program = ["-m", "tests.e2e.training.hydra_app"] if module else [str(APP)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", *program, "-m", f"hydra.sweep.dir='{folder}/a sweep, of mine'", *overrides],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,  # not reached: a loaded machine takes a minute to start the ranks of a job
        check=False,
    )
    left = [one for one in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(one.info["cmdline"] or [])]
    psutil.wait_procs(left, timeout=60)
    assert not [one for one in left if one.is_running()]
    return ran


def lines(folder: Path, job: int) -> list[list[str]]:
    """What each rank of a job has written, in rank order."""
    files = sorted((folder / "a sweep, of mine" / str(job)).glob("rank_*.txt"))
    return [file.read_text().split() for file in files]


def check(folder: Path, worlds: list[int]) -> list[list[list[str]]]:
    """Check that the ranks of each job have the same settings and weights, and that there is no other folder."""
    jobs = [lines(folder, job) for job in range(len(worlds))]
    assert [len(job) for job in jobs] == worlds
    for number, job in enumerate(jobs):
        assert all(line == job[0] for line in job), job
        if job:
            assert job[0][0] == str(worlds[number])
            assert job[0][5] == str(number)
    assert [path.name for path in folder.iterdir()] == ["a sweep, of mine"]
    return jobs


@pytest.mark.full
def test_jobs_of_another_world_size_each_start_afresh(tmp_path: Path) -> None:
    ran = sweep(tmp_path, "n=1,3", "text='a,é'", "lr=0.5")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check(tmp_path, [1, 3])


@pytest.mark.full
@pytest.mark.parametrize(("trainer", "fails"), [("fabric", "1"), ("lightning", "all")])
def test_a_failing_job_affects_no_other(trainer: str, fails: str, tmp_path: Path) -> None:
    ran = sweep(tmp_path, f"trainer={trainer}", f"fails={fails},none", "n=3,2")
    assert ran.returncode == 1
    assert "rank 0 fails" in ran.stderr or fails == "1"
    assert "the sweep ends here" not in ran.stderr
    check(tmp_path, [0, 0, 3, 2])


@pytest.mark.full
def test_ranks_that_wait_for_a_failed_rank_are_ended(tmp_path: Path) -> None:
    ran = sweep(tmp_path, "trainer=lightning", "fails=0,none", "n=3")
    assert ran.returncode == 1
    assert "rank 0 fails" in ran.stderr
    check(tmp_path, [0, 3])


@pytest.mark.full
def test_all_ranks_train_with_the_values_that_optuna_draws(tmp_path: Path) -> None:
    optuna = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1")
    ran = sweep(tmp_path, *optuna, "lr=interval(0.001,0.3)", "n=choice(2,3)", "trainer=lightning")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    worlds = [len(lines(tmp_path, job)) for job in range(3)]
    jobs = check(tmp_path, worlds)
    assert len({job[0][1] for job in jobs}) == 3


@pytest.mark.full
@pytest.mark.parametrize("method", ["popen", "fork", "spawn"])
def test_other_starts_of_a_program(method: str, tmp_path: Path) -> None:
    settings = ("hydra.job.chdir=true", "+model=wide,narrow", "text='a,b'", f"method={method}", "trainer=lightning")
    ran = sweep(tmp_path, *settings, module=method == "popen")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    if method == "popen":
        jobs = check(tmp_path, [2, 2])
        assert [(job[0][3], job[0][4]) for job in jobs] == [("a,b", "4"), ("a,b", "2")]
        assert [job[0][-1].rpartition("/")[2] for job in jobs] == ["0", "1"]
