"""Jobs under SLURM: the resources that a sweep requests, and a job that is requeued."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from lightning_cp.recipes.runs.outcome import Status, read_outcomes
from tests.e2e import fake_slurm
from tests.e2e.recipe import SMALL, ranks_of, run, started
from tests.e2e.training.test_faults import wait_for_checkpoint
from tests.e2e.training.test_sweep import sweep


@pytest.fixture(autouse=True)
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The commands of SLURM on PATH; the folder of what they note."""
    folder = fake_slurm.install(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(folder))
    return folder


@pytest.mark.full
def test_jobs_of_a_sweep_become_jobs_of_slurm(slurm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    settings = ("launcher=slurm", "strategy=cp", "accelerator=cpu", "ring=1,3", "hydra.launcher.partition=gpu")
    ran = sweep(*settings, folder=folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr + (slurm / "array.log").read_text()
    (script,) = slurm.glob("script_*")
    asked = fake_slurm.options(script)
    assert asked["array"].startswith("0-1%")
    assert asked["partition"] == "gpu"
    assert (asked["nodes"], asked["ntasks-per-node"]) == ("1", "1")
    assert "gpus-per-node" not in asked
    assert asked["signal"] == "USR1@120"
    assert asked["time"] == "1440"
    outcomes = read_outcomes(folder)
    assert [outcome.status for outcome in outcomes] == [Status.FINISHED] * 2
    assert [outcome.tokens_per_s for outcome in outcomes] == [100, 300]
    assert "sweep.csv" in ran.stdout


@pytest.mark.full
def test_across_nodes_slurm_starts_the_ranks(slurm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    settings = ("launcher=slurm", "strategy=cp", "num_nodes=2", "devices=2", "ring=2,4")
    ran = sweep(*settings, folder=folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr + (slurm / "array.log").read_text()
    (script,) = slurm.glob("script_*")
    asked = fake_slurm.options(script)
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("2", "2", "2")
    outcomes = read_outcomes(folder)
    assert [outcome.degrees for outcome in outcomes] == [
        {"data_parallel": 2, "ring": 2, "ulysses": 1},
        {"data_parallel": 1, "ring": 4, "ulysses": 1},
    ]
    assert [outcome.tokens_per_s for outcome in outcomes] == [400, 400]


@pytest.mark.full
def test_on_one_node_a_failed_job_affects_no_other_and_cpu_jobs_request_no_gpus(slurm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    settings = ("launcher=slurm", "strategy=cp", "devices=2", "accelerator=cpu", "ring=2", "+fault=raise_1,none")
    ran = sweep(*settings, folder=folder)
    assert ran.returncode == 1
    assert [outcome.status for outcome in read_outcomes(folder)] == [Status.FAILED, Status.FINISHED]
    (script,) = slurm.glob("script_*")
    assert "gpus-per-node" not in fake_slurm.options(script)
    assert fake_slurm.options(script)["ntasks-per-node"] == "1"


@pytest.mark.full
def test_a_job_that_exceeds_its_time_is_requeued_and_resumes(slurm: Path, tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    settings = (*SMALL, "strategy=cp", "ring=2", "max_steps=60", "checkpoint_every=2")
    with started(*settings, folder=tmp_path / "run", environment=job) as process:
        wait_for_checkpoint(tmp_path / "run", process)
        ranks = ranks_of(process)
        process.send_signal(signal.SIGUSR1)
        _, stderr = process.communicate(timeout=120)
        psutil.wait_procs(ranks, timeout=60)
    assert process.returncode == 128 + signal.SIGUSR1
    assert "SLURM will restart this job" in stderr
    assert "scontrol requeue 7" in (slurm / "calls").read_text().splitlines()
    again = run(*settings, folder=tmp_path / "again", environment={**job, "SLURM_RESTART_COUNT": "1"})
    assert again.exit_code == 0, again.stderr
    assert "SLURM restarted this job: it resumes from" in again.stdout
    assert [row.step for row in again.rows] == list(range(1, 61))
    for name, environment in (
        ("another run of the job", {**job, "SLURM_RESTART_COUNT": "2"}),
        ("another job", {**job, "SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}),
        ("odd numbers", {**job, "SLURM_RESTART_COUNT": "x", "SLURM_NTASKS": "", "SLURM_NNODES": "0"}),
    ):
        fresh = run(*SMALL, "max_steps=2", folder=tmp_path / name.replace(" ", "_"), environment=environment)
        assert fresh.exit_code == 0, fresh.stderr
        assert [row.step for row in fresh.rows] == [1, 2], name


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("strategy=cp ring=1,2", "set devices to the number of GPUs per node"),
        ("strategy=cp devices=1,2 accelerator=cpu", "devices cannot be swept"),
        ("strategy=cp ring=2 num_nodes=2 accelerator=cpu", "set devices to the number of ranks per node"),
    ],
)
@pytest.mark.default(1)
def test_what_slurm_could_not_run_is_not_submitted(slurm: Path, tmp_path: Path, settings: str, said: str) -> None:
    ran = sweep("launcher=slurm", *settings.split(), folder=tmp_path / "sweep")
    assert ran.returncode == 2
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (slurm / "calls").exists()
