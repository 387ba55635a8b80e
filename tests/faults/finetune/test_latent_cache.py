"""Writers that are killed, and disks that are full, leave a cache that the next run completes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from lightning_cp.errors import CacheError
from lightning_cp.finetune.latent_cache import CacheWriter, locks, prepare_cache
from tests.harness import warm
from tests.unit.finetune.latent_cache.made import add, check, index, make


class _KilledError(BaseException):
    """An exception that no code catches, like SIGKILL."""


class _Steps:
    """Count the steps of a run that reach the disk, and raise an error before one of them, or in the middle of it."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, error: BaseException) -> None:
        self.count, self.at, self.error = 0, at, error
        for name in ("rename", "fsync", "ftruncate", "write"):
            patch.setattr(os, name, self._step(getattr(os, name)))
        patch.setattr("lightning_cp.finetune.latent_cache.shards.save_file", self._step(save_file))
        for name in ("unlink", "chmod"):
            patch.setattr(Path, name, self._step(getattr(Path, name)))

    def _step(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def do(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                if real.__name__ == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                raise self.error
            return real(*args, **kwargs)

        return do


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def _run_until_killed(folder: Path, at: int) -> int:
    """Leave a cache as a process that is killed at a step leaves it. Returns: number of steps that were reached."""
    prepared = None
    with pytest.MonkeyPatch.context() as patch, suppress(_KilledError):
        steps = _Steps(patch, at, _KilledError())
        prepared = prepare_cache(folder, index())
        writer = CacheWriter(folder, shard_bytes=300)
        add(writer, range(5))
        writer.close()
        prepared.finish()
    owner = folder / ".owner.json"
    content = owner.read_bytes() if owner.exists() else b""
    if prepared is not None:
        prepared.release()
        owner.write_bytes(content)
    locks._close_in_child()  # the end of a process closes its files
    return steps.count


@pytest.mark.parametrize("resumed", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_run_that_is_killed_at_any_step_is_continued(tmp_path: Path, resumed: bool) -> None:
    """A run is killed at each step in turn; the next run completes the cache."""
    at, reached = 0, 0
    while reached == at:
        at += 1
        folder = tmp_path / str(at)
        if resumed:
            make(folder, 3)
        reached = _run_until_killed(folder, at)
        check(make(folder, 5), 5)
        shutil.rmtree(folder)
    assert at > (15 if resumed else 30)


def _run_until_full(folder: Path, at: int) -> tuple[int, str]:
    """Write a cache; one step fails. Returns: number of steps that were reached, and the error."""
    with pytest.MonkeyPatch.context() as patch:
        steps = _Steps(patch, at, full())
        try:
            with prepare_cache(folder, index()) as prepared:
                with CacheWriter(folder, shard_bytes=300) as writer:
                    add(writer, range(5))
                prepared.finish()
        except OSError as error:
            return steps.count, f"{error.errno} {error}"
    return steps.count, ""


@pytest.mark.full
def test_a_disk_that_is_full_at_any_step_is_one_error_and_a_cache_to_continue(tmp_path: Path) -> None:
    messages: list[str] = []
    for at in range(1, 1000):
        count, message = _run_until_full(folder := tmp_path / str(at), at)
        check(make(folder, 5), 5)
        shutil.rmtree(folder)
        if count < at:
            break
        messages.append(message)
    assert all(message.startswith(f"{errno.ENOSPC} ") for message in messages)
    assert sum("could not be written: it needs" in message for message in messages) > 20


def test_an_interrupt_in_the_middle_of_a_write_leaves_a_cache_to_continue(tmp_path: Path) -> None:
    real, left = os.write, [1]

    def write(descriptor: int, data: bytes) -> int:
        if left and left.pop():
            real(descriptor, data[: len(data) // 2])
            raise KeyboardInterrupt
        return real(descriptor, data)

    def run() -> None:
        with prepare_cache(tmp_path, index()), CacheWriter(tmp_path, shard_bytes=300) as writer:
            patch.setattr(os, "write", write)
            add(writer, range(5))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        run()
    assert list(tmp_path.glob("*.safetensors")) != []
    check(make(tmp_path, 5), 5)


def test_a_full_disk_is_named_and_what_was_stored_before_is_kept(tmp_path: Path) -> None:
    with prepare_cache(tmp_path, index()):
        writer = CacheWriter(tmp_path, shard_bytes=300)
        add(writer, range(2))
        with pytest.MonkeyPatch.context() as patch:
            _Steps(patch, 2, full())
            with pytest.raises(OSError, match="could not be written") as caught:
                add(writer, range(2, 5))
        pattern = rf"{tmp_path}/media-00000-000001.safetensors could not be written: it needs \d+ bytes, [\d.]+ MB are"
        assert caught.match(pattern)
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(CacheError, match=r"an earlier write to .* failed: run precompute again to continue"):
            writer.close()
    with prepare_cache(tmp_path, index()), CacheWriter(tmp_path) as again:
        assert list(again.done_ids()) == ["sample-0000", "sample-0001"]
    check(make(tmp_path, 5), 5)


_LIMITED = (
    "import resource, sys, traceback; from tests.unit.finetune.latent_cache.made import *\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    "for bytes in (300, 100_000):\n"
    "    try:\n"
    "        with prepare_cache(f'{sys.argv[1]}/{bytes}', index()) as prepared:\n"
    "            with CacheWriter(prepared.folder, shard_bytes=bytes) as writer: add(writer, range(30))\n"
    "    except OSError as error: print(error)"
)


def test_a_file_that_cannot_grow_is_one_error(tmp_path: Path) -> None:
    """The rows file meets the limit with shards of 300 bytes, in the middle of a line; otherwise the shard."""
    command = [sys.executable, "-c", _LIMITED, str(tmp_path)]
    ended = warm.run(command, timeout=120)
    assert len(ended.stdout.splitlines()) == 2, ended.stderr
    assert ended.stdout.count("free some space, then run precompute again to continue") == 2
    check(make(tmp_path / "300", 30), 30)
    check(make(tmp_path / "100000", 30), 30)


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.full)])
def test_writers_that_are_killed_lose_and_double_nothing(tmp_path: Path, kills: int) -> None:
    command = [sys.executable, "-m", "tests.faults.finetune.latent_cache_kills", str(tmp_path / "cache"), str(kills)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout)
    assert found["signals"] == [-signal.SIGKILL] * kills
    assert found["kept"] == sorted(found["kept"])
    assert found["kept"][-1] > found["kept"][0]
