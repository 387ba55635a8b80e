import json
from pathlib import Path

import pytest
import torch

from lightning_cp.checkpoint import CheckpointError, find_checkpoint, latest_checkpoint, read_manifest
from lightning_cp.checkpoint.store import (
    Checkpoint,
    CheckpointWriter,
    flatten_state,
    load_checkpoint,
    save_checkpoint,
    unflatten_state,
)

SHARD = "shard-00001-model-00001-of-00001.safetensors"


def save(parent: Path, step: int = 3, keep: int | None = None) -> Path:
    states = {"model": {"weight": torch.randn(4, 5), "bias": torch.zeros(5)}}
    return save_checkpoint(parent, Checkpoint(step, states, {"seed": 7}), keep=keep)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("file_bytes", [1 << 31, 20])
def test_what_is_saved_is_what_is_loaded(
    in_background: bool, file_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_cp.checkpoint.store._FILE_BYTES", file_bytes)
    tied = torch.randn(3, 4)
    states = {
        "model": {
            **{"a": tied, "b": tied, "rows": tied[1:], "transposed": tied.T, "none": tied[:0], "one": tied[0, 0]},
            **{"expanded": tied[:, :1].expand(3, 4), "half": torch.ones(2, dtype=torch.bfloat16)},
        },
        "optimizer": {"state": {0: {"step": torch.tensor(5.0)}}, "param_groups": [{"betas": (0.9, 0.99), "x": None}]},
    }
    with CheckpointWriter(tmp_path, in_background=in_background) as writer:
        writer.save(Checkpoint(12, states, {"seed": 7}))
    loaded = load_checkpoint(tmp_path / "step_00000012")
    assert (len(list((tmp_path / "step_00000012").glob("*.safetensors"))) > 1) == (file_bytes == 20)
    assert (loaded.step, loaded.facts) == (12, {"seed": 7})
    for name, x in states["model"].items():
        assert torch.equal(loaded.states["model"][name], x)
        assert loaded.states["model"][name].dtype == x.dtype
    assert loaded.states["optimizer"]["param_groups"] == states["optimizer"]["param_groups"]
    assert loaded.states["optimizer"]["state"][0]["step"] == 5


def test_a_state_that_would_need_pickle_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a\.0 is a set"):
        flatten_state({"a": [{1}]})
    with pytest.raises(TypeError, match="keys"):
        flatten_state({(1, 2): 3})
    tensors, tree = flatten_state({"a": [1, (torch.ones(1), "x")], 3: {}})
    assert unflatten_state(tensors, json.loads(json.dumps(tree))) == {"a": [1, (torch.ones(1), "x")], 3: {}}


def test_a_save_that_fails_leaves_the_older_one_and_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = save(tmp_path, 3)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("lightning_cp.checkpoint.store.FileEntry.of", fail)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 6)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.glob("step_*")] == [kept.name]
    assert read_manifest(kept).step == 3


def test_only_the_newest_are_kept_and_a_step_can_be_written_again(tmp_path: Path) -> None:
    for step in (1, 2, 10, 10):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000010"]


def test_what_was_just_written_is_kept_beside_later_steps_of_an_older_run(tmp_path: Path) -> None:
    for step in (8, 9, 3):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "step_00000009"]


def test_the_newest_by_time_is_found_at_the_depth_of_runs_and_sweeps(tmp_path: Path) -> None:
    save(tmp_path / "2026-01-01" / "10-00-00" / "checkpoints", 900)
    newest = save(tmp_path / "multirun" / "2026-01-01" / "0" / "checkpoints", 5)
    assert latest_checkpoint(tmp_path) == newest


@pytest.mark.parametrize(
    ("resume", "said"),
    [("last", "no complete checkpoint under"), ("nowhere", "resume=nowhere does not exist"), ("file", "is a file")],
)
def test_what_is_missing_is_named(resume: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=said):
        find_checkpoint(resume, tmp_path)
