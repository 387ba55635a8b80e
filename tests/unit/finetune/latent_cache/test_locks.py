"""One run writes a cache at a time; runs that ended, here or on another host, do not block the next one."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_cp.errors import CacheError
from lightning_cp.finetune.latent_cache import CacheWriter, LatentCache, locks, prepare_cache
from tests.unit.finetune.latent_cache.made import add, check, index, make

_HOLDS = (
    "import sys; from tests.unit.finetune.latent_cache.made import *\n"
    "prepared = prepare_cache(sys.argv[1], index()); writer = CacheWriter(sys.argv[1]); add(writer, range(3))\n"
    "writer.flush(); print('ready', flush=True); sys.stdin.read()"
)


def test_a_second_run_is_refused_while_the_first_one_lives(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLDS, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(
            CacheError, match=rf"is being written by process {process.pid} on host .*choose another out"
        ):
            prepare_cache(tmp_path, index())
        with pytest.raises(CacheError, match=r"rows-00000-media.jsonl is open in another process: give each rank its"):
            CacheWriter(tmp_path)
    finally:
        process.kill()
        process.communicate()
    check(make(tmp_path, 5), 5)


def test_a_second_run_in_the_same_process_is_refused(tmp_path: Path) -> None:
    make(tmp_path)
    with prepare_cache(tmp_path, index()) as prepared:
        with pytest.raises(CacheError, match="is being written by process"):
            prepare_cache(tmp_path, index())
        with CacheWriter(tmp_path), pytest.raises(CacheError, match="is open in another process"):
            CacheWriter(tmp_path)
        prepared.finish()
    check(LatentCache(tmp_path), 8)


def test_a_run_waits_for_ranks_of_the_run_before(tmp_path: Path) -> None:
    with prepare_cache(tmp_path, index()):
        writer = CacheWriter(tmp_path)
    with pytest.raises(CacheError, match=r"rows-00000-media.jsonl is still open in a process of an earlier run"):
        prepare_cache(tmp_path, index())
    writer.close()
    check(make(tmp_path), 8)


def _waits(ready: object, end: object) -> None:
    ready.set()  # type: ignore[attr-defined]
    end.wait(60)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_forked_workers_do_not_keep_the_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, end = context.Event(), context.Event()
    with prepare_cache(tmp_path, index()), CacheWriter(tmp_path) as writer:
        add(writer, range(2))
        process = context.Process(target=_waits, args=(ready, end))
        process.start()
        assert ready.wait(60)
    try:
        check(make(tmp_path), 8)
    finally:
        end.set()
        process.join()


def owned(folder: Path, **changes: object) -> None:
    """Leave the owner file of a killed run."""
    make(folder, 3)
    owner = {"host": "elsewhere", "pid": 1, "rows": {}, **changes}
    (folder / ".owner.json").write_text(json.dumps(owner))


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_WATCH_S", 0.4)
    monkeypatch.setattr(locks, "_BEAT_S", 0.05)


@pytest.mark.usefixtures("_quick")
def test_the_lock_of_another_host_is_taken_over_if_its_owner_is_silent(tmp_path: Path) -> None:
    owned(tmp_path)
    start = time.monotonic()
    check(make(tmp_path), 8)
    assert time.monotonic() - start > 0.4


@pytest.mark.usefixtures("_quick")
def test_the_lock_of_another_host_holds_while_its_owner_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_WATCH_S", 60.0)
    monkeypatch.setattr(locks, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: time.sleep(0.02)))
    made = prepare_cache(tmp_path / "other", index())  # its thread keeps its owner file fresh
    monkeypatch.setattr("socket.gethostname", lambda: "a third host")
    monkeypatch.setattr("fcntl.flock", lambda *_: None)  # a file system that does not share locks
    try:
        with pytest.raises(CacheError, match="the owner is on another host, and its file still changes"):
            prepare_cache(tmp_path / "other", index())
    finally:
        made.release()
    assert not (tmp_path / "other" / ".owner.json").exists()


def test_without_locks_the_process_of_this_host_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    host = locks.socket.gethostname()
    owned(tmp_path, host=host, pid=os.getppid())
    with pytest.raises(CacheError, match=f"is being written by process {os.getppid()}"):
        prepare_cache(tmp_path, index())
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    for owner in (json.dumps({"host": host, "pid": process.pid}), "{", json.dumps({"host": host, "pid": "x"})):
        (tmp_path / ".owner.json").write_text(owner)
        check(make(tmp_path), 8)
