"""For a program, a warm start looks like a new interpreter; its process is a child of the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.harness import warm

LOOKS = """
import json, os, sys, tempfile, threading
json.dump({
    "argv": sys.argv, "cwd": os.getcwd(), "environment": dict(os.environ), "session": os.getsid(0), "pid": os.getpid(),
    "parent": os.getppid(), "threads": threading.active_count(), "name": __name__, "path": sys.path,
    "descriptors": sorted(os.listdir("/proc/self/fd")), "temporary": tempfile.gettempdir(),
    "torch": "torch" in sys.modules,
}, sys.stdout)
print("to stderr", file=sys.stderr)
sys.exit(int(sys.argv[-2]))
"""
WAITS = "import time; print('here', flush=True); time.sleep(100)"
LAUNCHES = """
import signal, sys
from pathlib import Path
from lightning_cp.launch import Job, LocalLauncher

def target(settings):
    import json, logging, os
    config = json.loads(settings.read_text())
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert handlers == [signal.SIG_DFL, signal.default_int_handler], handlers
    assert not logging.getLogger().handlers
    is_child = os.getppid() == config["launcher"]
    print(f"rank {os.environ['RANK']} {os.environ['OMP_NUM_THREADS']} {sys.argv[0]} {is_child}")
    if os.environ["RANK"] == config["fails"]:
        raise LookupError("it fails")

if __name__ == "__main__":
    import json, logging, os
    logging.basicConfig(level=0)
    Path("config.yaml").write_text(json.dumps({"launcher": os.getpid(), "fails": sys.argv[1]}))
    job = Job(f"{__file__}:target", Path("config.yaml"), 3, Path("logs"), threads=1)
    result = LocalLauncher().launch(job)
    print(result.failure and result.failure.message)
    sys.exit(result.exit_code)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a warm start is an ordinary one")


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("program", [["script.py"], ["-m", "script"]])
def test_a_program_sees_what_a_new_interpreter_shows_it(program: list[str], tmp_path: Path) -> None:
    script(tmp_path, LOOKS)
    command = [sys.executable, *program, "3", "b c"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path), "SLURM_NEW": "1"}
    given = {"env": environment, "cwd": tmp_path, "start_new_session": True}
    cold = subprocess.run(command, capture_output=True, text=True, timeout=60, **given)
    found = warm.run(command, timeout=60, **given)
    assert (found.returncode, found.stderr) == (cold.returncode, cold.stderr) == (3, "to stderr\n")
    ours, theirs = json.loads(found.stdout), json.loads(cold.stdout)
    assert ours["session"] == ours["pid"]
    assert (ours["torch"], theirs["torch"]) == (True, False)
    for own in ("pid", "session", "torch"):
        del ours[own], theirs[own]
    assert ours == theirs
    assert ours["parent"] == os.getpid()


def test_programs_are_children_that_can_be_signalled_and_leave_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(script(tmp_path, WAITS))]
    with warm.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        assert process.poll() is None
        assert process.pid in [child.pid for child in psutil.Process().children()]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run(command, timeout=0.5)


def test_ranks_of_a_warm_launcher_start_as_its_children_without_its_state(tmp_path: Path) -> None:
    done = warm.run([sys.executable, script(tmp_path, LAUNCHES), "2"], cwd=tmp_path, timeout=60)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "rank 0 1 -c True" in done.stdout
    assert "rank 1 1 -c True" in (tmp_path / "logs" / "rank_1.log").read_text()
    assert "LookupError: it fails" in done.stdout


def test_a_variable_that_imports_may_read_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, script(tmp_path, LOOKS)]
    with pytest.raises(AssertionError, match="DIFFUSERS_VERBOSITY"):
        warm.run(command, env={**os.environ, "DIFFUSERS_VERBOSITY": "debug"}, timeout=60)
