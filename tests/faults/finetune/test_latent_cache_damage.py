"""A damaged cache is one CacheError that names the file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_cp.errors import CacheError
from lightning_cp.latent_cache import CacheWriter, LatentCache, prepare_cache
from tests.unit.finetune.latent_cache.made import check, index, make

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
    "newer version": (edit_json("index.json", format=3), "index.json has format 3; this version reads format 2"),
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


def test_a_folder_with_other_files_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-of-somebody").write_text("x")
    with pytest.raises(CacheError, match=r"holds other files \(.tmp-of-somebody, …\) and is no latent cache"):
        prepare_cache(tmp_path, index())
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-of-somebody"]
    with pytest.raises(CacheError, match="is a file: choose another output"):
        prepare_cache(tmp_path / ".tmp-of-somebody", index())
