import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf

from lightning_cp.launch import Failure, FailureKind, Job, LocalLauncher, Result, local
from lightning_cp.launch.processes import Event, Processes
from tests.harness.cases import in_turn
from tests.unit.launch.targets import FOREVER_S

TARGETS = Path(__file__).with_name("targets.py")
PATIENT, IMPATIENT = (
    LocalLauncher(grace_s=60),
    LocalLauncher(grace_s=0.5, terminate_s=0.5),
)  # for ranks that end, or not


def launch(
    function: str, folder: Path, *, ranks: int = 3, launcher: LocalLauncher = PATIENT, **settings: object
) -> Result:
    OmegaConf.save(OmegaConf.create({"folder": str(folder), **settings}), folder / "config.yaml")
    job = Job(f"{TARGETS}:{function}", folder / "config.yaml", ranks, folder / "logs", threads=2)
    return launcher.launch(job)


def failure_of(result: Result) -> Failure:
    assert result.failure is not None
    return result.failure


def assert_gone(folder: Path, count: int) -> None:
    pids = [int(pid) for path in folder.glob("*.pids") for pid in path.read_text().split()]
    assert len(pids) == count
    deadline = time.monotonic() + 60
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
    for name in ("OMP_NUM_THREADS", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    assert launch("write_environment", tmp_path).exit_code == 0
    written = [(tmp_path / f"{rank}.txt").read_text().split() for rank in range(3)]
    assert [fields[:5] for fields in written] == [[str(r), str(r), "0", "3", "127.0.0.1"] for r in range(3)]
    assert len({fields[5] for fields in written}) == 1
    assert {fields[6] for fields in written} == {"2"}
    assert capfd.readouterr() == ("rank 0 speaks\n", "rank 0 warns\n")
    assert (tmp_path / "logs" / "rank_2.log").read_text() == "rank 2 speaks\nrank 2 warns\n"
    assert dict(os.environ) == before


def test_consecutive_jobs_have_separate_worlds(tmp_path: Path) -> None:
    for ranks in (2, 3, 1):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        assert launch("write_environment", folder, ranks=ranks).exit_code == 0
        assert len(list(folder.glob("*.txt"))) == ranks


def test_a_refusal_is_one_line_and_ends_the_others(tmp_path: Path) -> None:
    started = time.monotonic()
    failure = failure_of(launch("refuse_on_one", tmp_path))
    assert time.monotonic() - started < FOREVER_S
    assert (failure.rank, failure.kind) == (1, FailureKind.REFUSED)
    assert failure.describe() == "shape=3 is not valid: must be 4"
    assert "Traceback" in (tmp_path / "logs" / "rank_1.traceback.txt").read_text()


def test_the_first_cause_is_reported_with_its_traceback_not_its_consequences(tmp_path: Path) -> None:
    failure = failure_of(launch("raise_on_one_then_everywhere", tmp_path))
    assert (failure.rank, failure.kind) == (1, FailureKind.RAISED)
    text = failure.describe()
    assert text.startswith("RuntimeError: the first cause (rank 1)")
    assert text.count("Traceback") == 1
    assert "targets.py" in text
    assert "closed by peer" not in text


ENDINGS = {  # how a rank ends -> the failure that is reported: its kind, message and exit code
    "signal 9": (FailureKind.SIGNAL, "rank {} was ended by signal 9 (SIGKILL)", 137),
    "signal 11": (FailureKind.SIGNAL, "rank {} was ended by signal 11 (SIGSEGV)", 139),
    "abort": (FailureKind.SIGNAL, "rank {} was ended by signal 6 (SIGABRT)", 134),
    "_exit 7": (FailureKind.EXIT, "rank {} ended with exit code 7", 7),
    "_exit 0": (FailureKind.EARLY, "rank {} exited with code 0 while other ranks were still running", 1),
    "exit 0": (FailureKind.EARLY, "rank {} exited with code 0 while other ranks were still running", 1),
    "exit 3": (FailureKind.EXIT, "rank {} ended with exit code 3", 3),
    "raise": (FailureKind.RAISED, "RuntimeError: raised on purpose", 1),
    "return": (FailureKind.EARLY, "rank {} returned from the target while other ranks were still waiting for it", 1),
    "workers": (FailureKind.EXIT, "rank {} ended with exit code 9", 9),
}


@pytest.mark.parametrize(("how", "rank"), in_turn(ENDINGS, (0, 2)))
@pytest.mark.default(2)
def test_the_rank_that_ended_first_is_named(how: str, rank: int, tmp_path: Path) -> None:
    kind, message, code = ENDINGS[how]
    for other in {0, 1, 2} - {rank}:
        os.mkfifo(tmp_path / f"to_{other}")
    launcher = IMPATIENT if how == "workers" else PATIENT  # the others wait for a connection that the worker holds
    result = launch("end_on_one", tmp_path, launcher=launcher, rank=rank, how=how)
    failure = failure_of(result)
    assert (failure.rank, failure.kind) == (rank, kind), failure
    assert failure.message.startswith(message.format(rank))
    assert result.exit_code == code
    if how == "abort" and rank:
        assert "last lines of its log" in failure.describe()
        assert "Fatal Python error: Aborted" in failure.describe()
        assert "targets.py" in failure.describe()  # the Python stack
    if kind is FailureKind.EARLY:
        assert "failed: ConnectionError: Connection closed by peer" in failure.describe()
        assert "\n" not in failure.describe()


def test_a_complete_rank_ends_without_c_exit_handlers_and_loses_nothing(tmp_path: Path) -> None:
    result = launch("leave_work_for_the_end", tmp_path)
    assert result.failure is None
    for rank in range(3):
        assert (tmp_path / f"file_{rank}").read_text() == "not flushed"
        assert (tmp_path / f"handler_{rank}").exists()
        assert (tmp_path / f"thread_{rank}").exists()


@pytest.mark.full
def test_the_rank_that_ended_first_is_named_however_often_it_is_tried(tmp_path: Path) -> None:
    for attempt in range(30):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        test_the_rank_that_ended_first_is_named(("_exit 7", "signal 9", "return")[attempt % 3], attempt % 3, folder)


def test_the_order_is_known_after_a_pause_of_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything has happened before the launcher reads it."""
    os.mkfifo(tmp_path / "to_0")
    os.mkfifo(tmp_path / "to_1")
    wait = Processes.wait

    def wait_late(ranks: Processes, timeout_s: float) -> list[Event]:
        deadline = time.monotonic() + 60
        while any(_runs(pid) for pid in ranks.pids()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return wait(ranks, timeout_s)

    monkeypatch.setattr(Processes, "wait", wait_late)
    failure = failure_of(launch("end_on_one", tmp_path, rank=2, how="_exit 5"))
    assert failure.describe() == "rank 2 ended with exit code 5"


def test_a_stall_is_on_the_terminal_once_with_the_rank_that_is_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    def go_on() -> None:  # once the first warning was printed: `is_stopped` was asked before
        while "continues it" not in "".join(shown):
            time.sleep(0.05)
            shown.append(capfd.readouterr().err)
        (tmp_path / "warned_all").touch()

    watcher = threading.Thread(target=go_on)
    watcher.start()
    assert launch("warn_of_first", tmp_path).exit_code == 0
    watcher.join(60)
    text, pid = "".join(shown) + capfd.readouterr().err, int((tmp_path / "pid").read_text())
    assert text.count("warning: a collective has not ended for 9 s") == 1, text
    assert re.search(r"ranks? 0.* sent no status", text), text
    assert f"rank 0 (process {pid}) is stopped: kill -CONT {pid} continues it" in text


def test_ranks_may_all_leave_by_exit(tmp_path: Path) -> None:
    assert launch("exit_apart", tmp_path, later_s=0).exit_code == 0


def test_a_rank_that_leaves_by_exit_long_before_the_others_fails_the_job(tmp_path: Path) -> None:
    failure = failure_of(launch("exit_apart", tmp_path, ranks=2, launcher=IMPATIENT, later_s=FOREVER_S))
    assert (failure.rank, failure.kind) == (1, FailureKind.EARLY)


def test_ranks_may_return_at_any_time(tmp_path: Path) -> None:
    assert launch("return_apart", tmp_path, ranks=2, launcher=IMPATIENT, later_s=1).exit_code == 0


def test_an_error_after_the_others_have_returned_is_its_own_cause(tmp_path: Path) -> None:
    failure = failure_of(launch("return_apart", tmp_path, ranks=2, later_s=1, fails=True))
    assert (failure.rank, failure.kind) == (0, FailureKind.RAISED)
    assert failure.message == "LookupError: of its own"


_FULL_DISKS = (
    "import json, resource, sys; sys.path[:] = json.loads(sys.argv[1]); from pathlib import Path\n"
    "from lightning_cp.launch import Job, LocalLauncher\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); d = Path(sys.argv[2])\n"
    "job = Job(sys.argv[3] + ':write_nothing', d / 'config.yaml', 3, d / 'logs')\n"
    "r = LocalLauncher(grace_s=0.5, terminate_s=0.5).launch(job)\n"
    "print(r.failure.describe())"
)


def test_a_failure_is_reported_when_no_file_can_be_written(tmp_path: Path) -> None:
    """Neither in TMPDIR nor in the folder of the run."""
    OmegaConf.save(OmegaConf.create({"folder": str(tmp_path)}), tmp_path / "config.yaml")
    command = [sys.executable, "-c", _FULL_DISKS, json.dumps(sys.path), str(tmp_path), str(TARGETS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.startswith("LookupError: the cause, after: File too large (rank 1)"), (
        ended.stdout + ended.stderr
    )
    assert (tmp_path / "logs" / "rank_1.traceback.txt").stat().st_size == 0


def test_what_ranks_started_ends_too_even_if_deaf_to_termination(tmp_path: Path) -> None:
    failure = failure_of(launch("start_and_wait", tmp_path, ranks=2, launcher=IMPATIENT, fail=True))
    assert failure.message == "RuntimeError: gone wrong"
    assert_gone(tmp_path, 4)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.default(1)
def test_ranks_end_with_their_launcher(number: int, tmp_path: Path) -> None:
    OmegaConf.save(OmegaConf.create({"folder": str(tmp_path)}), tmp_path / "config.yaml")
    code = (
        f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from pathlib import Path\n"
        f"from lightning_cp.launch import Job, LocalLauncher; d = Path({str(tmp_path)!r})\n"
        f"launcher = LocalLauncher(confirm_stop_s=1, terminate_s=0.5)\n"
        f"r = launcher.launch(Job({str(TARGETS)!r} + ':start_and_wait', d / 'config.yaml', 2, d / 'logs'))\n"
        f"print(r.failure.describe()); sys.exit(r.exit_code)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code, json.dumps(sys.path)], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.pids"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    launcher.send_signal(number)
    said, _ = launcher.communicate(timeout=60)
    assert_gone(tmp_path, 4)
    assert launcher.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert number == signal.SIGKILL or said.startswith(f"stopped by signal {int(number)}")


def test_a_signal_in_a_callback_whose_exceptions_python_ignores_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopping:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    listen = local.listen

    def stopping_listen() -> socket.socket:
        Stopping()
        return listen()

    monkeypatch.setattr(local, "listen", stopping_listen)
    failure = failure_of(launch("start_and_wait", tmp_path, ranks=2, launcher=IMPATIENT))
    assert failure.exit_code == 128 + signal.SIGTERM
    assert failure.message.startswith("stopped by signal 15")


def test_the_launcher_imports_no_torch() -> None:
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import lightning_cp.launch; "
        "print([m for m in ('torch', 'diffusers', 'lightning', 'numpy') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, json.dumps(sys.path)], capture_output=True, text=True, timeout=150
    )
    assert run.stdout.strip() == "[]", run.stdout + run.stderr
