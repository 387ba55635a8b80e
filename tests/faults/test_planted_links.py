"""Links that others have planted in an output folder are replaced or refused: their targets stay as they are."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_cp.app.runs.outcome import Outcome, Status
from lightning_cp.app.sampling.media import write_sample
from lightning_cp.app.training.records import MetricsFile
from lightning_cp.checkpoint.folder import atomic_file, atomic_folder
from lightning_cp.errors import CacheError
from lightning_cp.files import PRIVATE, make_private, new_file, no_link
from lightning_cp.latent_cache.index import write_json
from lightning_cp.latent_cache.locks import lock_file
from lightning_cp.latent_cache.shards import write_shard
from lightning_cp.sampling.tiles import write_png


def _atomic(path: Path) -> None:
    with atomic_file(path) as scratch:
        scratch.write_text("new")


def _folder(path: Path) -> None:
    with atomic_folder(path.parent / "model") as scratch:
        (scratch / path.name).write_text("new")


WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "atomic file": ("a.json.partial", lambda folder: _atomic(folder / "a.json")),
    "its target": ("a.json", lambda folder: _atomic(folder / "a.json")),
    "atomic folder": ("model.partial", lambda folder: _folder(folder / "a")),
    "index": (".tmp-index.json", lambda folder: write_json(folder / "index.json", {"a": 1})),
    "shard": (
        ".tmp-s.safetensors",
        lambda folder: write_shard(folder / "s.safetensors", {"a": {"x": torch.ones(2)}}, cache_id="c"),
    ),
    "sheet": ("a.png", lambda folder: write_png(torch.zeros(4, 4, 3, dtype=torch.uint8), folder / "a.png")),
    "picture": ("b.png", lambda folder: write_sample(np.zeros((4, 4, 3), np.uint8), folder / "b", format="png")),
    "clip": ("b.gif", lambda folder: write_sample(np.zeros((2, 4, 4, 3), np.uint8), folder / "b", format="gif")),
    "sound": ("b.wav", lambda folder: write_sample(torch.zeros(1, 50), folder / "b", format="wav")),
    "metrics": ("metrics.csv", lambda folder: MetricsFile(folder / "metrics.csv").__exit__(None, None, None)),
    "new file": ("x", lambda folder: new_file(folder / "x").write_text("new")),
}


@pytest.mark.parametrize("to", ["file", "nothing"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_planted_link_is_not_written_through(tmp_path: Path, name: str, to: str) -> None:
    link, write = WRITERS[name]
    folder, target = tmp_path / "out", tmp_path / "target"
    folder.mkdir()
    if to == "file":
        target.write_text("precious")
        target.chmod(0o640)
    (folder / link).symlink_to(target)
    write(folder)
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert [path.name for path in folder.iterdir()], "something was written"
    if to == "file":
        assert (target.read_text(), stat.S_IMODE(target.stat().st_mode)) == ("precious", 0o640)
    else:
        assert not target.exists()


def test_links_to_folders_are_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target/a").write_text("precious")
    for name in ("a.json", "a.json.partial", "a.json.replaced"):
        (tmp_path / name).symlink_to(tmp_path / "target")
    _atomic(tmp_path / "a.json")
    assert (tmp_path / "a.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "target"]
    assert (tmp_path / "target/a").read_text() == "precious"


def test_files_that_are_continued_may_be_no_links_or_fifos(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CacheError, match="link is a link, which is not followed"):
        lock_file(tmp_path / "link", os.O_RDWR | os.O_CREAT)
    for name in ("link", "fifo"):
        with pytest.raises(OSError, match=name), open(tmp_path / name, "a", opener=no_link):
            raise AssertionError("opened")


def test_files_with_overrides_are_private(tmp_path: Path) -> None:
    hydra = tmp_path / ".hydra"
    hydra.mkdir()
    (tmp_path / "target").write_text("")
    (tmp_path / "target").chmod(0o644)
    for name in ("config.yaml", "overrides.yaml"):
        (hydra / name).write_text("token")
        (hydra / name).chmod(0o644)
    (hydra / "link").symlink_to(tmp_path / "target")
    make_private(hydra)
    outcome = Outcome(0, ["token=x"], {}, Status.FINISHED, "", 0, 1, 0.0, 0.0, 0.0, 0.0, 0.0, "x")
    outcome.write(tmp_path)
    files = [hydra / "config.yaml", hydra / "overrides.yaml", *tmp_path.glob("*/0.json")]
    assert len(files) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {PRIVATE}
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == 0o644
