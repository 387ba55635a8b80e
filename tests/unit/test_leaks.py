"""The fixture that runs around every test detects each kind of leak, and undoes it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

from tests.harness import leaks


def test_nothing_left_behind_is_no_leak() -> None:
    assert leaks.left_behind(leaks.surroundings()) == []


def test_an_environment_variable_is_noticed_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "before")
    before = leaks.surroundings()
    os.environ["LEFT"] = "1"
    os.environ["KEPT"] = "after"
    assert leaks.left_behind(before) == ["environment variables ['KEPT', 'LEFT']"]
    assert os.environ["KEPT"] == "before"
    assert "LEFT" not in os.environ


def test_a_process_group_is_noticed_and_undone() -> None:
    before = leaks.surroundings()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert leaks.left_behind(before) == ["process group"]
    assert not dist.is_initialized()


def test_a_thread_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "_GRACE_S", 0.1)
    before, end = leaks.surroundings(), threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten")
    thread.start()
    assert leaks.left_behind(before) == ["thread 'forgotten'"]
    end.set()
    thread.join()
    assert leaks.left_behind(before) == []


def test_a_child_process_is_noticed_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "_GRACE_S", 0.1)
    before = leaks.surroundings()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    (leak,) = leaks.left_behind(before)
    assert leak.startswith(f"child process {child.pid}: ")
    assert child.wait(60) < 0
