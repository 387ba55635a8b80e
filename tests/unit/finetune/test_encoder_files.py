"""Changes in the files of a pipeline's encoders that are detected, and changes that are ignored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightning_cp.errors import CacheError, StaleCacheError
from lightning_cp.finetune.encoder_files import SETTING, check_made_by, describe_files


def _pipeline(folder: Path, *, scale: float = 1.0, files: int = 1, text: str = "a b", origin: str = "x") -> Path:
    (folder / "vae").mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{i}": scale * torch.randn(50, 7, generator=generator) for i in range(4)}
    for k in range(files):
        part = {name: x for i, (name, x) in enumerate(tensors.items()) if i % files == k}
        save_file(part, folder / "vae" / f"model-{k}.safetensors")
    (folder / "vae/config.json").write_text(json.dumps({"_name_or_path": origin, "size": 7}))
    (folder / "tokenizer/vocab.txt").write_text(text)
    return folder


def test_the_same_weights_in_other_files_are_the_same(tmp_path: Path) -> None:
    first = describe_files(_pipeline(tmp_path / "a"), ["vae", "tokenizer", "absent"])
    assert first.keys() == {"vae", "tokenizer"}
    assert describe_files(_pipeline(tmp_path / "b", files=3, origin="y"), ["vae", "tokenizer"]) == first


def test_other_weights_and_vocabularies_are_noticed(tmp_path: Path) -> None:
    made = {SETTING: describe_files(_pipeline(tmp_path / "a"), ["vae", "tokenizer"])}
    check_made_by(tmp_path, made, tmp_path / "a")
    with pytest.raises(StaleCacheError, match="encoded with another vae than"):
        check_made_by(tmp_path, made, _pipeline(tmp_path / "b", scale=1.001))
    with pytest.raises(StaleCacheError, match="encoded with another tokenizer than"):
        check_made_by(tmp_path, made, _pipeline(tmp_path / "c", text="a c"))


def test_what_cannot_be_compared_passes(tmp_path: Path) -> None:
    check_made_by(tmp_path, {}, tmp_path)  # a cache of an earlier version
    check_made_by(tmp_path, {SETTING: {"vae": "x"}}, "owner/name")


def test_an_index_names_no_folder_outside_of_the_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, other = _pipeline(tmp_path / "a"), _pipeline(tmp_path / "b")
    names = ["../b/vae", str(other / "vae"), "..", ".", "vae/../../b/vae", "vae/"]
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"read {path}"))
    check_made_by(tmp_path, {SETTING: dict.fromkeys(names, "0" * 32)}, pipeline)


def test_damaged_files_are_one_error(tmp_path: Path) -> None:
    folder = _pipeline(tmp_path / "a")
    (folder / "vae/model-0.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CacheError, match="is damaged, or cannot be read"):
        describe_files(folder, ["vae"])
