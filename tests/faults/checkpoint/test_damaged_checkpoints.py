"""Changed manifests and files: one CheckpointError, or the tensors that were saved."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cp.checkpoint import CheckpointError, find_checkpoint, latest, latest_checkpoint
from lightning_cp.checkpoint.store import Checkpoint, flatten_state, load_checkpoint, save_checkpoint
from tests.e2e.recipe import run

pytestmark = pytest.mark.filterwarnings("ignore")


def states(value: float = 1.0) -> dict[str, Any]:
    groups = [{"lr": value, "betas": (value, 0.5), "name": "x", "none": None}]
    return {
        "model": {"weight": torch.full((3, 4), value), "bias": torch.full((3,), value, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(value)}}, "param_groups": groups},
    }


def written(parent: Path, step: int = 3) -> Path:
    return save_checkpoint(parent, Checkpoint(step, states(), {"seed": 7, "sampler": {"batch_size": 4}}))


def loaded(folder: Path) -> Checkpoint:
    return load_checkpoint(folder, {"model": states(0.0)["model"]})


def same(found: Checkpoint, step: int = 3) -> bool:
    (ours, tree), (theirs, other) = flatten_state(states()), flatten_state(dict(found.states))
    equal = ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())
    return equal and tree == other and found.step == step and found.facts == {"seed": 7, "sampler": {"batch_size": 4}}


def test_changed_bytes_of_the_manifest_are_one_error_or_load(tmp_path: Path) -> None:
    folder, rng = written(tmp_path / "checkpoints"), random.Random(60)
    path, refused = folder / "manifest.json", 0
    whole = path.read_bytes()
    for _ in range(60):
        content = bytearray(whole)
        for _ in range(rng.choice([1, 1, 3])):
            content[rng.randrange(len(whole))] = rng.randrange(256)
        path.write_bytes(content)
        error = None
        try:
            assert same(loaded(folder))  # white space has changed
        except CheckpointError as caught:
            refused, error = refused + 1, str(caught)
        assert error is None or (str(folder) in error and len(error) < 700)
    assert refused > 30


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return do


def put(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / "manifest.json").write_bytes(content) and None


def add_file(folder: Path) -> None:
    shutil.copy(next(folder.glob("*.safetensors")), folder / "shard-00009-model-00001-of-00001.safetensors")


def flip(folder: Path) -> None:
    content = bytearray((folder / SHARD).read_bytes())
    content[-1] ^= 1
    (folder / SHARD).write_bytes(content)


SHARD = "shard-00001-model-00001-of-00001.safetensors"
EDITS: dict[str, Callable[[Path], None]] = {
    "another step": edit(lambda m: m.update(step=-3)),
    "format a bool": edit(lambda m: m.update(format=True)),
    "format of lists": edit(lambda m: m.update(format=[[]])),
    "deep": put(b'{"format": 3, "facts": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "duplicate key": put(b'{"format": 3, "format": 2}'),
    "not UTF-8": put(b'{"format": "\xff"}'),
    "UTF-16": put('{"format": 3}'.encode("utf-16")),
    "many digits": put(b'{"format": 3, "step": ' + b"9" * 100_000 + b"}"),
    "a list": put(b"[]"),
    "empty": put(b""),
    "a file more": add_file,
    "another format": edit(lambda m: m.update(format=99)),
    "cut manifest": lambda folder: os.truncate(folder / "manifest.json", 40),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "cut file": lambda folder: os.truncate(folder / SHARD, 40),
    "no file": lambda folder: (folder / SHARD).unlink(),
    "a bit": flip,
}  # fmt: skip


def test_an_edited_checkpoint_is_one_error_and_passed_over(tmp_path: Path) -> None:
    for name, change in EDITS.items():
        root, run = tmp_path / name, tmp_path / name / "run"
        good, folder = (written(run / "checkpoints", step) for step in (2, 3))
        change(folder)
        with pytest.raises(CheckpointError) as caught:
            loaded(folder)
        assert str(folder) in str(caught.value), name
        with pytest.raises(CheckpointError) as caught:
            find_checkpoint(str(folder), tmp_path)
        assert "resume=" in str(caught.value), name
        assert find_checkpoint("last", root) == find_checkpoint(str(run), root) == good, name


def test_tensors_that_would_get_one_name_are_not_saved() -> None:
    with pytest.raises(ValueError, match=r"saved as a\.b"):
        flatten_state({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})


def test_files_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        folder = written(tmp_path)
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o640"}


def test_a_damaged_newer_checkpoint_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older, good, bad = (written(tmp_path / "run" / "checkpoints", step) for step in (1, 2, 3))
    EDITS["empty"](older)
    os.utime(older, (0, 0))
    os.truncate(next(bad.glob("*.safetensors")), 40)
    caplog.clear()  # torch logs each save
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path) == good
    (said,) = [record.getMessage() for record in caplog.records]
    assert str(bad) in said
    assert "safetensors has 40 bytes" in said


def test_what_may_not_be_read_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = written(tmp_path / "run" / "checkpoints", 1)
    locked = written(tmp_path / "theirs" / "checkpoints", 2)
    hidden = written(tmp_path / "hidden" / "checkpoints", 3)
    opened, listed = os.open, os.listdir

    def may_open(path: Any, *args: Any, **settings: Any) -> int:
        if Path(path).parent == locked:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **settings)

    def may_list(path: Any = ".") -> list[str]:
        if hidden.is_relative_to(path) and Path(path) != tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "open", may_open)
    monkeypatch.setattr(os, "listdir", may_list)
    assert latest_checkpoint(tmp_path) == good
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        find_checkpoint(str(locked), tmp_path)


def test_a_checkpoint_that_replaces_the_listed_one_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, list_children = tmp_path / "run" / "checkpoints", latest._children
    save_checkpoint(parent, Checkpoint(1, states(), {}))

    def replaced_after_the_list(folder: Path) -> list[Path]:
        children = list_children(folder)
        if folder == parent and parent / "step_00000001" in children:
            save_checkpoint(parent, Checkpoint(2, states(), {}), keep=1)
        return children

    monkeypatch.setattr(latest, "_children", replaced_after_the_list)
    newest = latest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.name == "step_00000002"


def test_the_recipe_names_a_newer_checkpoint_that_it_skips(tmp_path: Path) -> None:
    newest = tmp_path / "outputs" / "a" / "checkpoints" / "step_00000009"
    newest.mkdir(parents=True)
    finished = run("resume=last", f"output_root={tmp_path / 'outputs'}", folder=tmp_path / "outputs" / "run")
    assert finished.exit_code == 2
    skipped, refused = finished.stderr.splitlines()
    assert skipped.startswith(f"skipped the newer checkpoint {newest}: ")
    assert refused.startswith("error: resume=last: there is no complete checkpoint")
