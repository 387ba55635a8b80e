"""Errors that a user sees when settings are bad or a rank fails, and that nothing is left running."""

import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from lightning_cp.checkpoint import latest_checkpoint, read_manifest
from lightning_cp.recipes.training.records import read_metrics
from tests.e2e.recipe import RECIPE, ROOT, SMALL, ranks_of, run, started
from tests.harness import warm
from tests.harness.cases import and_others

TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d")
ENDLESS = (*SMALL, "strategy=cp", "ring=2", "max_steps=100000", "checkpoint_every=2")


_REFUSED = [
    ("strategy=cp ring=0", "ring=0"),  # a rule
    ("rign=2", "rign"),  # a key
    ("model=nothing", "wan_tiny"),  # Hydra's own error
    ("launcher=slurm", "add -m"),
]


@pytest.mark.parametrize("refused", and_others(_REFUSED))
@pytest.mark.default(1)
def test_bad_settings_are_refused_at_once(refused: list[tuple[str, str]], tmp_path: Path) -> None:
    for given, said in refused:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        # In a new program: a warm one has imported everything.
        finished = run(*given.split(), folder=tmp_path / "run", cold=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)  # CPU time: other programs do not change it
        assert after.ru_utime - before.ru_utime < 10
        assert finished.exit_code != 0
        assert said in finished.stderr
        assert "Traceback" not in finished.stderr
        assert finished.stdout == ""


def wait_for_checkpoint(folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 180
    while latest_checkpoint(folder) is None:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("victim", ["rank 1", "rank 0", "recipe"])
@pytest.mark.default(1)
def test_a_kill_ends_the_job_and_the_last_checkpoint_is_complete(victim: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started(*ENDLESS, folder=folder) as process:
        wait_for_checkpoint(folder, process)
        ranks = ranks_of(process)
        assert len(ranks) == 2
        os.kill(process.pid if victim == "recipe" else ranks[int(victim[-1])].pid, signal.SIGKILL)
        _, stderr = process.communicate(timeout=120)
        if victim != "recipe":
            assert process.returncode == 128 + signal.SIGKILL
            assert f"error: {victim} was ended by signal 9" in stderr
            assert "Traceback" not in stderr
        _, alive = psutil.wait_procs(ranks, timeout=60)
        assert alive == []
    newest = latest_checkpoint(folder)
    assert newest is not None
    assert read_manifest(newest).step >= 2


@pytest.mark.parametrize(
    ("number", "trainer"), [(signal.SIGUSR1, "fabric"), (signal.SIGINT, "fabric"), (signal.SIGTERM, "lightning")]
)
@pytest.mark.full
def test_a_stopped_job_writes_a_checkpoint_and_resumes_from_it(number: int, trainer: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started(*ENDLESS, f"trainer={trainer}", folder=folder) as process:
        wait_for_checkpoint(folder, process)
        ranks = ranks_of(process)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=120)
        _, alive = psutil.wait_procs(ranks, timeout=60)
    assert alive == []
    assert process.returncode == 128 + number
    assert "Traceback" not in stderr
    newest = latest_checkpoint(folder)
    assert newest is not None
    step = read_manifest(newest).step
    done = [row.step for row in read_metrics(folder / "metrics.csv")]
    assert step == done[-1]
    assert f"stopped by {signal.Signals(number).name} after step {step}" in stderr
    resumed = run(*SMALL, "resume=last", f"max_steps={step + 1}", folder=tmp_path / "resumed")
    assert resumed.exit_code == 0, resumed.stderr
    assert [row.step for row in resumed.rows] == list(range(1, step + 2))


@pytest.mark.full
@pytest.mark.parametrize(("steps", "every"), [(2, "null"), (100, "1")], ids=["at the end", "on the way"])
def test_a_job_is_stopped_while_it_samples_and_can_be_gone_on_with(steps: int, every: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = (*SMALL, "sampling.num_inference_steps=100000", f"sampling.every={every}", f"max_steps={steps}")
    with started(*settings, "strategy=cp", "ring=2", folder=folder) as process:
        deadline = time.monotonic() + 180
        rows = min(steps, 1 if every == "1" else steps)
        while not (folder / "metrics.csv").exists() or len(read_metrics(folder / "metrics.csv")) < rows:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert f"stopped by SIGTERM after step {rows}, with a checkpoint" in stderr
    resumed = run(*SMALL, "resume=last", f"max_steps={max(rows, 2)}", folder=tmp_path / "resumed")
    assert resumed.exit_code == 0, resumed.stderr
    assert (resumed.folder / "samples" / "final.png").is_file()


@pytest.mark.full
def test_an_impatient_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    with started(*ENDLESS, folder=tmp_path / "run", environment={"TMPDIR": str(tmp_path)}) as process:
        wait_for_checkpoint(tmp_path / "run", process)
        ranks = ranks_of(process)
        for _ in range(4):
            process.send_signal(signal.SIGINT)
            time.sleep(0.03)
        _, stderr = process.communicate(timeout=120)
        _, alive = psutil.wait_procs(ranks, timeout=60)
    assert alive == []
    assert process.returncode == 128 + signal.SIGINT
    assert "stopped by" in stderr
    assert "Traceback" not in stderr
    assert not list(tmp_path.glob("lightning_cp_*"))


@pytest.mark.parametrize(("rank", "trainer"), [(1, "fabric"), (0, "lightning")])
@pytest.mark.default(1)
def test_a_rank_that_raises_ends_the_job_with_its_own_error_first(rank: int, trainer: str, tmp_path: Path) -> None:
    settings = (f"trainer={trainer}", "model._target_=tests.e2e.failing.FailingDenoiser", f"+model.fails_on={rank}")
    finished = run(*ENDLESS, *settings, folder=tmp_path / "run", timeout_s=200)  # collectives have 300 s
    assert finished.exit_code == 1
    assert finished.stderr.count("error:") == 1
    first = next(line for line in finished.stderr.splitlines() if "error:" in line)
    assert first == f"error: ZeroDivisionError: the third forward fails (rank {rank})"
    assert "failing.py" in finished.stderr
    assert 1 <= len(finished.rows) <= 2


@pytest.mark.full
@pytest.mark.parametrize("trainer", ["fabric", "lightning"])
def test_torchrun_starts_the_ranks_just_as_well(trainer: str, tmp_path: Path) -> None:
    settings = (*SMALL, f"trainer={trainer}", "strategy=cp", "ring=2", "max_steps=2")
    finished = run(*settings, folder=tmp_path / "run", launcher=TORCHRUN)
    assert finished.exit_code == 0, finished.stderr
    assert len(finished.rows) == 2
    assert finished.stdout.count("recognises") == 1


def test_ranks_with_the_variables_of_torchrun_train(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = (*SMALL, "strategy=cp", "ring=2", "max_steps=2", f"hydra.run.dir={folder}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "warm"}
    ended = warm.run_ranks(2, [sys.executable, str(RECIPE), *settings], timeout=150, env=environment, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert len(read_metrics(folder / "metrics.csv")) == 2
    assert ended.stdout.count("recognises") == 1


@pytest.mark.full
def test_an_error_under_torchrun_is_printed_once_even_if_rank_zero_is_late(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        'import os, time\nif os.environ.get("RANK") == "0":\n    time.sleep(1.5)\n', encoding="utf-8"
    )
    late = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    refused = run("strategy=cp", "ring=3", folder=tmp_path / "run", launcher=TORCHRUN, environment=late)
    assert refused.exit_code != 0
    assert refused.stderr.count("ring=3 × ulysses=1 = 3 must divide the 2 ranks that torchrun started") == 1


@pytest.mark.full  # it waits for the first rank's word
def test_a_rank_that_alone_fails_under_torchrun_prints_the_reason(tmp_path: Path) -> None:
    """The disk of one rank's node is full: the first rank raises no error, and waits for the others."""
    (tmp_path / "of_1").touch()
    folder = f"run_dir={tmp_path}/of_${{oc.env:RANK}}"
    refused = run("strategy=cp", "ring=2", folder, folder=tmp_path / "run", launcher=TORCHRUN)
    assert refused.exit_code != 0
    assert refused.stderr.count(f"run_dir={tmp_path}/of_1 cannot be written to: File exists; set run_dir to") == 1
    assert refused.stderr.count("that can be written to (rank 1)") == 1


@pytest.mark.full
def test_ranks_that_slurm_started_join_each_other(tmp_path: Path) -> None:
    """Start ranks as srun does: one process a task, places in SLURM's variables, one node."""
    folder = tmp_path / "run"
    slurm = {
        "SLURM_JOB_ID": str(10_000 + os.getpid() % 10_000),
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    places = [{**slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    settings = (*SMALL, "strategy=cp", "ulysses=2", "max_steps=2")
    with ExitStack() as stack:
        tasks = [stack.enter_context(started(*settings, folder=folder, environment=place)) for place in places]
        ended = [task.communicate(timeout=120) for task in tasks]
        assert [task.returncode for task in tasks] == [0, 0], ended
    assert "recognises" in ended[0][0]
    assert "recognises" not in ended[1][0]
    assert len(read_metrics(folder / "metrics.csv")) == 2
