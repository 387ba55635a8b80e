"""Writers that are killed, and disks that are full, leave a cache that the next run completes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_cp.finetune.latent_cache import LatentCache, prepare_cache
from tests.harness import warm
from tests.unit.finetune.latent_cache.made import CAPTIONS, add, check, index, make, write


class _KilledError(BaseException):
    """An exception that no code catches, like SIGKILL."""


class _Steps:
    """Count the steps of a run that reach the disk, and raise an error before one of them, or in the middle of it."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, error: BaseException) -> None:
        self.count, self.at, self.error = 0, at, error
        for owner, names in ((os, ("rename", "fsync")), (Path, ("unlink", "write_bytes", "mkdir", "rename"))):
            for name in names:
                patch.setattr(owner, name, self._step(getattr(owner, name)))

    def _step(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def do(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if (self.count >= self.at and isinstance(self.error, _KilledError)) or self.count == self.at:
                if real.__name__ == "write_bytes" and self.count == self.at:
                    real(args[0], args[1][: len(args[1]) // 2])
                raise self.error
            return real(*args, **kwargs)

        return do


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.default(1)
def test_a_run_that_is_killed_at_any_step_is_continued(tmp_path: Path, resumed: bool) -> None:
    """A run is killed at each step in turn: no later step is done. The next run completes the cache."""
    at, reached = 0, 0
    while reached >= at:
        at += 1
        folder = tmp_path / str(at)
        if resumed:
            make(folder, 1)
        with pytest.MonkeyPatch.context() as patch, suppress(_KilledError):
            steps = _Steps(patch, at, _KilledError())
            write(folder, [0], CAPTIONS[:3]).finish()
        reached = steps.count
        if (folder / "contents.json").exists():  # killed after the last file, or before any
            (folder / "previous.json").unlink(missing_ok=True)  # the last step of a run
            check(LatentCache(folder), 1)
        check(make(folder, 2), 2)
        shutil.rmtree(folder)
    assert at > (10 if resumed else 30)


@pytest.mark.full
def test_a_disk_that_is_full_at_any_step_is_one_error_and_a_cache_to_continue(tmp_path: Path) -> None:
    messages: list[str] = []
    for at in range(1, 1000):
        folder = tmp_path / str(at)
        with pytest.MonkeyPatch.context() as patch:
            steps = _Steps(patch, at, full())
            try:
                write(folder, range(5)).finish()
            except OSError as error:
                messages.append(f"{error.errno} {error}")
        check(make(folder, 5), 5)
        shutil.rmtree(folder)
        if steps.count < at:
            break
    assert all(message.startswith(f"{errno.ENOSPC} ") for message in messages)
    assert sum("could not be written: No space left" in message for message in messages) > 20


def test_a_full_disk_is_named_and_what_was_stored_before_is_kept(tmp_path: Path) -> None:
    writer = write(tmp_path, range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(full()))
        with pytest.raises(OSError, match="could not be written") as caught:
            add(writer, range(2, 5))
    assert caught.match(rf"{tmp_path}/media/../\w+.safetensors could not be written: No space left .* free some space")
    assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.glob(".tmp-*"))
    assert len(list(tmp_path.glob("media/*/*"))) == 2
    check(make(tmp_path, 5), 5)


_LIMITED = (
    "import resource, sys, traceback; from tests.unit.finetune.latent_cache.made import *\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    "writer = write(sys.argv[1], range(30))\n"
    "try: writer.finish()\n"
    "except OSError as error: print(error)"
)


def test_a_file_that_cannot_grow_is_one_error(tmp_path: Path) -> None:
    ended = warm.run([sys.executable, "-c", _LIMITED, str(tmp_path)], timeout=120)
    assert "contents.json could not be written: File too large" in ended.stdout, ended.stderr
    assert "free some space if the disk is full, then run precompute again to continue" in ended.stdout
    check(make(tmp_path, 30), 30)


def test_what_killed_writers_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    make(tmp_path, 3)
    old, new, others = tmp_path / f".tmp-{'0' * 32}", tmp_path / f".tmp-{'1' * 32}", tmp_path / "notes.txt"
    for path in (old, new, others):
        path.write_text("x")
        os.utime(path, (time.time() - (0 if path == new else 4000),) * 2)
    prepare_cache(tmp_path, index())
    assert (old.exists(), new.exists(), others.exists()) == (False, True, True)


@pytest.mark.parametrize("kills", [5, 50])
@pytest.mark.full
def test_writers_that_are_killed_lose_and_double_nothing_and_three_runs_complete_it(tmp_path: Path, kills: int) -> None:
    command = [sys.executable, "-m", "tests.faults.finetune.latent_cache_kills", str(tmp_path / "cache"), str(kills)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout)
    assert found["signals"] == [-signal.SIGKILL] * kills
    assert found["kept"] == sorted(found["kept"])
    assert found["kept"][-1] > found["kept"][0]
