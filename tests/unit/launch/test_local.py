import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf

from lightning_cp.launch import Failure, FailureKind, Job, LocalLauncher, Result

TARGETS = Path(__file__).with_name("targets.py")


def launch(function: str, folder: Path, *, ranks: int = 3, **settings: object) -> Result:
    OmegaConf.save(OmegaConf.create({"folder": str(folder), **settings}), folder / "config.yaml")
    job = Job(f"{TARGETS}:{function}", folder / "config.yaml", ranks, folder / "logs", threads=2)
    return LocalLauncher().launch(job)


def failure_of(result: Result) -> Failure:
    assert result.failure is not None
    return result.failure


def assert_gone(folder: Path, count: int) -> None:
    pids = [int(pid) for path in folder.glob("*.pids") for pid in path.read_text().split()]
    assert len(pids) == count
    deadline = time.monotonic() + 5
    while left := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_ranks_know_their_place_and_only_the_first_speaks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    assert launch("tell", tmp_path).exit_code == 0
    told = [(tmp_path / f"{rank}.txt").read_text().split() for rank in range(3)]
    assert [fields[:5] for fields in told] == [[str(r), str(r), "0", "3", "127.0.0.1"] for r in range(3)]
    assert len({fields[5] for fields in told}) == 1
    assert {fields[6] for fields in told} == {"2"}
    assert capfd.readouterr() == ("rank 0 speaks\n", "rank 0 warns\n")
    assert (tmp_path / "logs" / "rank_2.log").read_text() == "rank 2 speaks\nrank 2 warns\n"
    assert dict(os.environ) == before


def test_two_jobs_one_after_the_other_have_worlds_of_their_own(tmp_path: Path) -> None:
    for ranks in (2, 3, 1):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        assert launch("tell", folder, ranks=ranks).exit_code == 0
        assert len(list(folder.glob("*.txt"))) == ranks


def test_a_refusal_is_one_line_and_ends_the_others(tmp_path: Path) -> None:
    started = time.monotonic()
    failure = failure_of(launch("refuse_on_one", tmp_path))
    assert time.monotonic() - started < 10
    assert (failure.rank, failure.kind) == (1, FailureKind.REFUSED)
    assert failure.describe() == "shape=3 is not valid: must be 4"
    assert "Traceback" in (tmp_path / "logs" / "rank_1.traceback.txt").read_text()


def test_the_first_cause_is_told_with_its_traceback_not_what_followed(tmp_path: Path) -> None:
    failure = failure_of(launch("raise_on_one_then_everywhere", tmp_path))
    assert (failure.rank, failure.kind) == (1, FailureKind.RAISED)
    text = failure.describe()
    assert text.startswith("RuntimeError: the first cause (rank 1)")
    assert text.count("Traceback") == 1
    assert "targets.py" in text
    assert "closed by peer" not in text


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_named_with_its_signal(rank: int, number: int, tmp_path: Path) -> None:
    result = launch("die_by_signal", tmp_path, rank=rank, signal=int(number))
    failure = failure_of(result)
    assert (failure.rank, failure.kind) == (rank, FailureKind.SIGNAL)
    assert failure.describe().startswith(f"rank {rank} was ended by signal {int(number)}")
    assert result.exit_code == 128 + number


def test_an_exit_code_is_passed_on(tmp_path: Path) -> None:
    result = launch("leave", tmp_path)
    assert failure_of(result).describe() == "rank 1 ended with exit code 7"
    assert result.exit_code == 7


def test_what_ranks_started_ends_too_even_if_deaf_to_termination(tmp_path: Path) -> None:
    failure = failure_of(launch("start_and_wait", tmp_path, ranks=2, fail=True))
    assert failure.message == "RuntimeError: gone wrong"
    assert_gone(tmp_path, 4)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_end_with_their_launcher(number: int, tmp_path: Path) -> None:
    OmegaConf.save(OmegaConf.create({"folder": str(tmp_path)}), tmp_path / "config.yaml")
    code = (
        f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from pathlib import Path\n"
        f"from lightning_cp.launch import Job, LocalLauncher; d = Path({str(tmp_path)!r})\n"
        f"r = LocalLauncher().launch(Job({str(TARGETS)!r} + ':start_and_wait', d / 'config.yaml', 2, d / 'logs'))\n"
        f"print(r.failure.describe()); sys.exit(r.exit_code)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code, json.dumps(sys.path)], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while len(list(tmp_path.glob("*.pids"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    launcher.send_signal(number)
    said, _ = launcher.communicate(timeout=20)
    assert_gone(tmp_path, 4)
    assert launcher.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert number == signal.SIGKILL or said.startswith(f"stopped by signal {int(number)}")


def test_the_launcher_imports_no_torch() -> None:
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import lightning_cp.launch; "
        "print([m for m in ('torch', 'diffusers', 'lightning', 'numpy') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code, json.dumps(sys.path)], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "[]", run.stdout + run.stderr
