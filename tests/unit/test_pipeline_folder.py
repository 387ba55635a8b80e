"""Tell folders, ids on the Hub and other names apart, and ask the Hub once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_cp.finetune.encoders import pipeline_class
from lightning_cp.finetune.pipeline import load_pipeline
from lightning_cp.pipeline_folder import check_source


@pytest.mark.parametrize(
    ("source", "passes"),
    [
        ("owner/name", True),
        ("owner-1/name_2.1-dev", True),
        ("here", True),
        ("absent", False),
        ("./owner/name", False),
        ("../name", False),
        ("~/name", False),
        ("/owner/name", False),
        ("owner/name/", False),
        ("owner/name/transformer", False),
        ("owner/", False),
        ("here/file.safetensors", False),
    ],
)
def test_a_source_is_an_existing_folder_or_an_id(
    source: str, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here/file.safetensors").touch()
    if passes:
        check_source(source, "source")
        return
    with pytest.raises(ValueError, match=r"source=.* must be a pipeline's folder, or the id of one on the Hub"):
        check_source(source, "source")


@pytest.mark.parametrize("find", [lambda name: load_pipeline(name, torch.float32), pipeline_class])
def test_the_hub_is_asked_once(find: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fail(source: str, **_: Any) -> None:
        asked.append(source)
        raise OSError("no connection\nmore lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ValueError, match=r"=owner/absent is not a folder, and cannot be downloaded: no connection$"):
        find("owner/absent")
    assert asked == ["owner/absent"]
