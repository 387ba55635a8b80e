"""Damaged caches are one CacheError that names the file; a full disk and killed writers leave a cache to continue."""

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
import torch
from safetensors.torch import load_file, save_file

from lightning_cp.errors import CacheError
from lightning_cp.latent_cache import CacheWriter, LatentCache, locks, prepare_cache
from tests.unit.latent_cache.made import add, check, index, make

SHARD, TEXTS, ROWS = "media-00000-000001.safetensors", "text-00000-000000.safetensors", "rows-00000-media.jsonl"


def edit_json(name: str, **changes: Any) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))

    return do


def edit_rows(change: Callable[[list[str]], list[str]], name: str = ROWS) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(change(lines)))

    return do


def from_another(name: str) -> Callable[[Path], None]:
    """Take a file of a cache with the same contents."""

    def do(folder: Path) -> None:
        make(folder.with_name("another"))
        shutil.copy(folder.with_name("another") / name, folder / name)

    return do


def truncate(name: str, bytes: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - bytes)


def flip(name: str, position: int) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[position] ^= 4
        (folder / name).write_bytes(content)

    return do


def resaved(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Change the tensors of a shard, with a size and a checksum of the rows file that fit."""

    def do(folder: Path) -> None:
        tensors = load_file(folder / SHARD)
        change(tensors)
        save_file(
            tensors, folder / SHARD, metadata={"cache": json.loads((folder / "index.json").read_text())["cache_id"]}
        )
        size = (folder / SHARD).stat().st_size
        counts = json.loads((folder / "complete.json").read_text())
        lines = [json.loads(line) for line in (folder / ROWS).read_text().splitlines()]
        for line in lines:
            if line["shard"] == SHARD and "crc32" in line:
                counts["bytes"] += size - line["size_bytes"]
                line["size_bytes"] = size
        (folder / ROWS).write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "complete.json").write_text(json.dumps(counts))

    return do


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated shard": (truncate(SHARD, 1), rf"{SHARD} is damaged: it has \d+ bytes, but \d+ were written. Restore"),
    "empty shard": (lambda folder: os.truncate(folder / SHARD, 0), f"{SHARD} is damaged: it has 0 bytes"),
    "missing shard": (lambda folder: (folder / SHARD).unlink(), f"{SHARD} cannot be read: No such file"),
    "missing texts": (lambda folder: (folder / TEXTS).unlink(), f"{TEXTS} cannot be read: No such file"),
    "flipped header": (flip(SHARD, 12), f"{SHARD} (is damaged|does not hold|belongs)"),
    "flipped length": (flip(SHARD, 0), f"{SHARD} is damaged"),
    "shard of another cache": (from_another(SHARD), f"{SHARD} belongs to another cache"),
    "rows of another cache": (from_another(ROWS), f"{ROWS} belongs to another cache"),
    "counts of another cache": (from_another("complete.json"), "complete.json belongs to another cache"),
    "unknown shard": (
        lambda folder: shutil.copy(folder / SHARD, folder / "media-00009-000000.safetensors"),
        "media-00009-000000.safetensors is in no rows file",
    ),
    "no rows": (lambda folder: (folder / ROWS).unlink(), "was changed after it was complete"),
    "lost row": (
        edit_rows(lambda lines: lines[1:]),
        f"{ROWS} is damaged in line 2: media-00000-000000.safetensors has 1 rows, but 2 were written. Restore",
    ),
    "double row": (
        edit_rows(lambda lines: [lines[0], *lines]),
        f"{ROWS} is damaged in line 4: .* has 3 rows, but 2 were",
    ),
    "double shard": (edit_rows(lambda lines: lines[:3] + lines), f"{ROWS} is damaged: the shard .* is listed twice"),
    "half a row": (truncate(ROWS, 5), f"{ROWS} ends with an unfinished write: run precompute again to continue"),
    "row without a shard": (edit_rows(lambda lines: [*lines, lines[0]]), f"{ROWS} ends with an unfinished write"),
    "same id": (
        edit_rows(lambda lines: [line.replace("sample-0003", "sample-0002") for line in lines]),
        "'sample-0002' is stored twice",
    ),
    "wrong number": (
        edit_rows(lambda lines: [line.replace('"number": 1', '"number": 7') for line in lines]),
        "does not hold the samples of its rows",
    ),
    "a field too many": (
        edit_rows(lambda lines: [line.replace('"id":', '"x": 1, "id":') for line in lines]),
        f"{ROWS} is damaged in line 1: it must have exactly the fields id, source",
    ),
    "wrong type": (
        edit_rows(lambda lines: [line.replace('"frames": 1', '"frames": "1"') for line in lines]),
        "line 1: frames='1' must be an integer of at least 1",
    ),
    "a path as a shard": (
        edit_rows(lambda lines: [line.replace('"media-', '"../media-') for line in lines]),
        "must be the name of a shard",
    ),
    "a shard's line lost": (
        edit_rows(lambda lines: lines[:2] + lines[3:]),
        f"{ROWS} is damaged in line 3: it belongs to {SHARD}, the line before to media-00000-000000.safetensors",
    ),
    "not JSON": (edit_rows(lambda lines: ["{\n", *lines]), f"{ROWS} is damaged in line 1: it is not valid JSON"),
    "changed caption": (
        edit_rows(lambda lines: [line.replace("caption 1", "caption 9") for line in lines], "rows-00000-text.jsonl"),
        "rows-00000-text.jsonl is damaged: the caption of .* was changed",
    ),
    "changed length": (
        edit_rows(
            lambda lines: [line.replace('"length": 1', '"length": 9') for line in lines], "rows-00000-text.jsonl"
        ),
        "does not have the 9 positions of its row",
    ),
    "lost tensor": (resaved(lambda tensors: tensors.pop("0/latents_std")), f"{SHARD}: sample 0 has the tensors"),
    "lost sample": (
        resaved(lambda tensors: [tensors.pop(f"0/{name}") for name in ("latents", "latents_std")]),
        f"{SHARD} does not hold the samples of its rows",
    ),
    "other sizes": (
        resaved(lambda tensors: tensors.update({"0/latents": torch.zeros(9, dtype=torch.bfloat16)})),
        rf"{SHARD}: latents of sample 0 have shape \[9\], but other samples of",
    ),
    "newer version": (edit_json("index.json", format=2), "index.json has format 2; this version reads format 1"),
    "no version": (edit_json("index.json", format="1"), "index.json is damaged, or not the file of a latent cache: it"),
    "another field": (edit_json("index.json", x=1), "must have exactly the fields family, facts"),
    "another type": (edit_json("index.json", facts=[]), r"facts=\[\] must be a JSON object"),
    "someone else's JSON": (
        lambda folder: (folder / "index.json").write_text('{"weight_map": {}}'),
        "index.json is damaged, or not the file of a latent cache: it has no valid format number",
    ),
    "a list": (lambda folder: (folder / "index.json").write_text("[1]"), "index.json is damaged.*not a JSON object"),
    "no index": (lambda folder: (folder / "index.json").unlink(), "is not a latent cache: it has no index.json"),
    "other counts": (edit_json("complete.json", samples=3), "was changed after it was complete"),
    "not complete": (
        lambda folder: (folder / "complete.json").unlink(),
        "is not complete: it has 8 samples and 7 texts",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_noticed_when_the_cache_is_opened(tmp_path: Path, damage: str) -> None:
    folder, (do, message) = tmp_path / "cache", DAMAGES[damage]
    make(folder)
    do(folder)
    with pytest.raises(CacheError, match=message) as caught:
        LatentCache(folder)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 900


def test_changed_values_are_noticed_by_verify(tmp_path: Path) -> None:
    made = make(tmp_path)
    made.verify()
    for name in (SHARD, TEXTS):
        flip(name, -1)(tmp_path)
        with pytest.raises(CacheError, match=rf"{name} is damaged: its CRC-32 is \d+, but \d+ was written. Restore"):
            LatentCache(tmp_path).verify()
        flip(name, -1)(tmp_path)
    check(LatentCache(tmp_path), 8)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_shard_that_is_truncated_later_raises_and_does_not_end_the_process(tmp_path: Path, is_open: bool) -> None:
    made = make(tmp_path, shard_bytes=1 << 20)
    if is_open:
        made.sample(1)
    (path,) = tmp_path.glob("media-*")
    os.truncate(path, 100)
    with pytest.raises(CacheError, match=r"is damaged: it has 100 bytes, but \d+ were written"):
        made.sample(7)


def test_a_damaged_shard_is_made_again_as_the_error_says(tmp_path: Path) -> None:
    make(tmp_path)
    os.truncate(tmp_path / SHARD, 50)
    with pytest.raises(CacheError, match=f"or delete the lines with {SHARD} in {ROWS} and run precompute again"):
        prepare_cache(tmp_path, index())
    edit_rows(lambda lines: [line for line in lines if SHARD not in line])(tmp_path)
    check(make(tmp_path), 8)


def test_damaged_rows_are_made_again_as_the_error_says(tmp_path: Path) -> None:
    make(tmp_path)
    edit_rows(lambda lines: [*lines[:4], "x\n", *lines[4:]])(tmp_path)
    with pytest.raises(CacheError, match=r"in line 5: .* delete this line and all lines below it and run precompute"):
        prepare_cache(tmp_path, index())
    edit_rows(lambda lines: lines[:4])(tmp_path)
    check(make(tmp_path), 8)


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    make(tmp_path, 3)
    for name in (".tmpXy12Zw", ".tmp-index.json", "media-00005-000000.safetensors", "text-00000-000009.safetensors"):
        shutil.copy(tmp_path / SHARD, tmp_path / name)
    for name in ("notes.txt", "lora.safetensors"):
        (tmp_path / name).write_text("mine")
    make(tmp_path, 5)
    made = LatentCache(tmp_path)
    for name in ("notes.txt", "lora.safetensors"):
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    check(made, 5)


def test_rows_that_change_during_a_run_are_noticed(tmp_path: Path) -> None:
    make(tmp_path, 3)
    with prepare_cache(tmp_path, index()):
        with (tmp_path / ROWS).open("a") as file:
            file.write('{"half')
        with pytest.raises(
            CacheError, match=f"{ROWS} was changed after prepare_cache: end this run and start it again"
        ):
            CacheWriter(tmp_path)
    check(make(tmp_path, 3), 3)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".tmp-of-somebody").write_text("x")
    with pytest.raises(CacheError, match=r"holds other files \(.tmp-of-somebody, …\) and is no latent cache"):
        prepare_cache(tmp_path, index())
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-of-somebody"]
    with pytest.raises(CacheError, match="is a file: choose another output"):
        prepare_cache(tmp_path / ".tmp-of-somebody", index())


class _KilledError(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


class _Steps:
    """Count the steps of a run that reach the disk, and raise an error before one of them, or in the middle of it."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, error: BaseException) -> None:
        self.count, self.at, self.error = 0, at, error
        for name in ("rename", "fsync", "ftruncate", "write"):
            patch.setattr(os, name, self._step(getattr(os, name)))
        patch.setattr("lightning_cp.latent_cache.shards.save_file", self._step(save_file))
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
    """Every step is the last one of a run once; the next run completes the cache."""
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
    assert sum("could not be written to" in message for message in messages) > 20


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
        pattern = (
            rf"media-00000-000001.safetensors could not be written to {tmp_path}: it needs \d+ bytes, [\d.]+ MB are"
        )
        assert caught.match(pattern)
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(CacheError, match=r"an earlier write to .* failed: run precompute again to continue"):
            writer.close()
    with prepare_cache(tmp_path, index()), CacheWriter(tmp_path) as again:
        assert list(again.done_ids()) == ["sample-0000", "sample-0001"]
    check(make(tmp_path, 5), 5)


_LIMITED = (
    "import resource, sys, traceback; from tests.unit.latent_cache.made import *\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
    "for bytes in (300, 100_000):\n"
    "    try:\n"
    "        with prepare_cache(f'{sys.argv[1]}/{bytes}', index()) as prepared:\n"
    "            with CacheWriter(prepared.folder, shard_bytes=bytes) as writer: add(writer, range(30))\n"
    "    except OSError as error: print(error)"
)


def test_a_file_that_cannot_grow_is_one_error(tmp_path: Path) -> None:
    """With shards of 300 bytes the rows file meets the limit, in the middle of a line; otherwise the shard."""
    command = [sys.executable, "-c", _LIMITED, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert len(ended.stdout.splitlines()) == 2, ended.stderr
    assert ended.stdout.count("free some space, then run precompute again to continue") == 2
    check(make(tmp_path / "300", 30), 30)
    check(make(tmp_path / "100000", 30), 30)


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.full)])
def test_writers_that_are_killed_lose_and_double_nothing(tmp_path: Path, kills: int) -> None:
    command = [sys.executable, "-m", "tests.faults.latent_cache_kills", str(tmp_path / "cache"), str(kills)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout)
    assert found["signals"] == [-signal.SIGKILL] * kills
    assert found["kept"] == sorted(found["kept"])
    assert found["kept"][-1] > found["kept"][0]
