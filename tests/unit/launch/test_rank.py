"""Test which exceptions are reported in one line, and which with their traceback."""

import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch

from lightning_cp import ContextParallelConfig
from lightning_cp.checkpoint import CheckpointError
from lightning_cp.checkpoint.folder import EARLIER_KEPT
from lightning_cp.checkpoint.store import Checkpoint, save_checkpoint
from lightning_cp.launch.job import FailureKind, Job
from lightning_cp.launch.rank import ExternalLauncher, LauncherEnv, failure_of
from lightning_cp.recipes.training.records import read_metrics
from tests.harness import warm


def _caught(action: object, *args: object) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        action(*args)  # type: ignore[operator]
    return caught.value


def test_what_we_raise_for_the_user_is_one_line() -> None:
    refused = failure_of(_caught(lambda: ContextParallelConfig(ring_degree=0)), rank=1)
    assert refused.kind is FailureKind.REFUSED
    assert refused.describe() == refused.message
    assert "ring" in refused.message
    assert failure_of(CheckpointError("resume=x: cut short"), rank=0).kind is FailureKind.REFUSED


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightning_cp.checkpoint.store.flush", fails)
    failure = failure_of(_caught(save_checkpoint, tmp_path, Checkpoint(1, {"a": {"x": torch.zeros(1)}}, {})), rank=0)
    assert failure.kind is FailureKind.REFUSED
    assert f"step_00000001 could not be written ({EARLIER_KEPT}): rank 0: " in failure.message
    assert "No space left on device" in failure.message
    assert "\n" not in failure.describe()


def test_a_mistake_in_our_own_code_or_elsewhere_has_its_traceback() -> None:
    mistake = failure_of(_caught(read_metrics, 3), rank=1)  # an AttributeError or TypeError within the package
    assert mistake.kind is FailureKind.RAISED
    assert "(rank 1)" in mistake.describe()
    assert "records.py" in mistake.describe()
    assert failure_of(_caught(int, "x"), rank=0).kind is FailureKind.RAISED


def test_a_lost_connection_under_a_launcher_is_one_sentence(tmp_path: Path) -> None:
    def fails(_: object) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")

    (tmp_path / "config.yaml").write_text("{}", encoding="utf-8")
    with mock.patch("lightning_cp.launch.rank.load_target", return_value=fails):
        launcher = ExternalLauncher(LauncherEnv("torchrun", 3, 4, 2))
        failure = launcher.launch(Job("", tmp_path / "config.yaml", 4, tmp_path)).failure
    assert failure is not None
    assert failure.describe().startswith("rank 3 lost the connection to another rank, which has exited or cannot")
    assert "gloo" not in failure.describe()


@pytest.mark.parametrize("rank", [0, 2])
def test_under_a_launcher_only_rank_0_prints_the_traceback(rank: int, tmp_path: Path) -> None:
    def fails(_: object) -> None:
        raise RuntimeError("on all ranks")

    (tmp_path / "config.yaml").write_text("{}", encoding="utf-8")
    with mock.patch("lightning_cp.launch.rank.load_target", return_value=fails):
        launcher = ExternalLauncher(LauncherEnv("torchrun", rank, 3, 3))
        failure = launcher.launch(Job("", tmp_path / "config.yaml", 3, tmp_path / "logs")).failure
    assert failure is not None
    shown, log = failure.describe(), tmp_path / "logs" / "rank_2.traceback.txt"
    assert shown.startswith(f"RuntimeError: on all ranks (rank {rank})")
    assert ("Traceback (most" in shown) == (rank == 0)
    assert rank == 0 or (str(log) in shown and "Traceback (most" in log.read_text())


ORPHAN = """
import os, sys, time
from pathlib import Path
from lightning_cp.launch import channel

channel._POLL_S = 0.05
if os.fork() == 0:
    os.setsid()
    channel.end_with_parent()
    Path(sys.argv[1]).write_text(str(os.getpid()))
    time.sleep(600)
while not Path(sys.argv[1]).is_file():
    time.sleep(0.05)
os._exit(0)
"""


@pytest.mark.full
def test_a_rank_ends_after_the_agent_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(ORPHAN, encoding="utf-8")
    with warm.Popen([sys.executable, str(script), str(tmp_path / "pid")], stderr=subprocess.PIPE) as agent:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        rank = psutil.Process(int((tmp_path / "pid").read_text()))
        assert agent.wait(timeout=60) == 0
        rank.wait(timeout=60)
        assert agent.stderr is not None
        assert f"torchrun's agent (process {agent.pid}) has ended" in str(agent.stderr.read())
