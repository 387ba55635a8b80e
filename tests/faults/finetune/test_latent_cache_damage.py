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
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lightning_cp.errors import CacheError
from lightning_cp.latent_cache import LatentCache, prepare_cache
from tests.unit.finetune.latent_cache.made import check, index, make

SAMPLE, OTHER = (index().file("media", f"sample-000{i}", f"{i}") for i in (0, 2))


def edit_json(name: str, **changes: Any) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))

    return do


def edit(old: str, new: str) -> Callable[[Path], None]:
    """Change the list of samples."""

    def do(folder: Path) -> None:
        text = (folder / "contents.json").read_text()
        assert old in text
        (folder / "contents.json").write_text(text.replace(old, new))

    return do


def flip(position: int, name: str = SAMPLE) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[position] ^= 4
        (folder / name).write_bytes(content)

    return do


def of_other_settings(folder: Path) -> None:
    """Take the list of a cache with the same samples, made by other encoders."""
    other = index(fingerprint={"vae.weights": "other"})
    (folder / "contents.json").write_text((folder / "contents.json").read_text().replace(index().hash, other.hash))


def pipe(folder: Path) -> None:
    (folder / SAMPLE).unlink()
    os.mkfifo(folder / SAMPLE)


def resaved(folder: Path) -> None:
    """Write other values with the same facts."""
    with safe_open(folder / SAMPLE, "pt") as opened:
        header = opened.metadata()
    tensors = {name: torch.ones_like(x) for name, x in load_file(folder / SAMPLE).items()}
    save_file(tensors, folder / SAMPLE, metadata=header)


OPENED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing sample": (lambda folder: (folder / SAMPLE).unlink(), f"{SAMPLE} is missing. Run precompute again"),
    "missing texts": (lambda folder: shutil.rmtree(folder / "text"), r"text/.* is missing. Run precompute again"),
    "list of other encoders": (of_other_settings, "contents.json is damaged: it belongs to another cache. Run precom"),
    "not JSON": (
        lambda folder: os.truncate(folder / "contents.json", 500),
        "contents.json is damaged: .* cannot be re",
    ),
    "a list": (lambda folder: (folder / "contents.json").write_text("[1]"), "damaged: .* must hold a JSON object"),
    "no list": (edit_json("contents.json", media=3), "contents.json is damaged: 'int' object is not iterable"),
    "no samples": (edit_json("contents.json", media=[]), "contents.json is damaged: it has no samples"),
    "a row of another type": (edit_json("contents.json", media=[3]), "it must have exactly the fields id, source"),
    "same id": (edit("sample-0003", "sample-0002"), "the sample 'sample-0002' is listed twice"),
    "another id": (edit("sample-0003", "sample-0009"), "is missing. Run precompute again"),
    "a field too many": (edit('"id":', '"x": 1, "id":'), "it must have exactly the fields id, source"),
    "wrong type": (edit('"frames": 1', '"frames": "1"'), "frames='1' must be a whole number from 1"),
    "a size that no number holds": (edit('"frames": 1', '"frames": 1e999'), "frames=inf must be a whole number"),
    "changed caption": (edit("caption 1", "caption 9"), "it has no text .*, a caption of sample 'sample-000"),
    "another version": (edit_json("index.json", format=2), "index.json has format 2; this one reads format 3"),
    "another field": (edit_json("index.json", x=1), "must have exactly the fields family, facts"),
    "another type": (edit_json("index.json", facts=[]), r"facts=\[\] must be a JSON object"),
    "someone else's JSON": (
        lambda folder: (folder / "index.json").write_text('{"weight_map": {}}'),
        "index.json is damaged, or not the file of a latent cache: it must have exactly the fields",
    ),
    "no index": (lambda folder: (folder / "index.json").unlink(), "is not a latent cache: it has no index.json"),
    "a pipe": (
        lambda folder: ((folder / "contents.json").unlink(), os.mkfifo(folder / "contents.json")),
        "contents.json cannot be read: it is a named pipe",
    ),
    "not complete": (
        lambda folder: (folder / "contents.json").unlink(),
        "is not complete: it has 8 samples and 7 texts",
    ),
}
READ: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda folder: os.truncate(folder / SAMPLE, 100), "its checksum is not the one that was written"),
    "empty": (lambda folder: os.truncate(folder / SAMPLE, 0), "its checksum is not the one that was written"),
    "longer": (lambda folder: os.truncate(folder / SAMPLE, 1 << 20), "its checksum is not the one that was written"),
    "huge": (lambda folder: os.truncate(folder / SAMPLE, 1 << 40), "it has 1099511627776 bytes, but may have at most"),
    "flipped value": (flip(-1), "its checksum is not the one that was written"),
    "flipped header": (flip(12), "its checksum is not the one that was written"),
    "flipped length": (flip(0), "its checksum is not the one that was written"),
    "written again": (resaved, "its checksum is not the one that was written"),
    "file of another sample": (
        lambda folder: shutil.copy(folder / OTHER, folder / SAMPLE),
        "it is the file of another sample",
    ),
    "a pipe": (pipe, "it is a named pipe, but must be a regular file"),
    "a folder": (lambda folder: ((folder / SAMPLE).unlink(), (folder / SAMPLE).mkdir()), "it is a folder"),
    "a link to nothing": (
        lambda folder: ((folder / SAMPLE).unlink(), (folder / SAMPLE).symlink_to("nothing")),
        "No such file",
    ),
}


def test_damage_is_noticed_when_the_cache_is_opened(tmp_path: Path) -> None:
    made = make(tmp_path / "made").folder
    for damage, (do, message) in OPENED.items():
        folder = Path(shutil.copytree(made, tmp_path / damage))
        do(folder)
        with pytest.raises(CacheError, match=message) as caught:
            LatentCache(folder)
        assert str(folder) in str(caught.value), damage
        assert len(str(caught.value)) < 900, damage
        if "index" not in str(caught.value):
            check(make(folder), 8)  # the next run repairs it


def test_damage_is_noticed_when_a_sample_is_read_and_repaired_as_the_error_says(tmp_path: Path) -> None:
    for damage, (do, message) in READ.items():
        folder = tmp_path / damage
        made = make(folder)
        do(folder)
        for read in (lambda made=made: made.sample(0), made.verify, LatentCache(folder).verify):
            with pytest.raises(CacheError, match=rf"{SAMPLE} is damaged, or cannot be read: .*{message}.* Delete it"):
                read()
        made.sample(1)
        (folder / SAMPLE).rmdir() if (folder / SAMPLE).is_dir() else (folder / SAMPLE).unlink()
        with pytest.raises(CacheError, match=rf"{SAMPLE} is missing\. Run precompute again"):
            LatentCache(folder)
        check(make(folder), 8)


def test_damaged_headers_are_written_again(tmp_path: Path) -> None:
    for damage in ("truncated", "empty", "longer", "flipped length", "file of another sample", "a pipe"):
        make(tmp_path)
        READ[damage][0](tmp_path)
        check(make(tmp_path), 8)


def test_a_folder_with_other_files_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-of-somebody").write_text("x")
    with pytest.raises(CacheError, match=r"holds other files \(.tmp-of-somebody, …\) and is no latent cache"):
        prepare_cache(tmp_path, index())
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-of-somebody"]
    with pytest.raises(CacheError, match="is a file: choose another output"):
        prepare_cache(tmp_path / ".tmp-of-somebody", index())
