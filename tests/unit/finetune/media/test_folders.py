"""Several folders with their own settings: names, captions, repeats and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from PIL import Image

from lightning_cp.errors import DataError
from lightning_cp.media import DataFolder, find_in_folders, find_sources
from lightning_cp.recipes.settings.data_folders import data_folders
from lightning_cp.recipes.settings.table import SettingsError


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two pictures of a dog with captions, and one of the class without."""
    for name, caption in (("own/a", "a man, smiling"), ("own/b", "a man\na tall man"), ("class/a", None)):
        file = tmp_path / f"{name}.png"
        file.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(file)
        if caption is not None:
            file.with_suffix(".txt").write_text(caption)
    return tmp_path


def test_one_folder_is_found_as_without_settings(data: Path) -> None:
    assert find_in_folders([DataFolder(path=data / "own")]) == find_sources(data / "own")


def test_each_folder_has_its_own_settings(data: Path) -> None:
    own = DataFolder(path=data / "own", repeats=3, sizes=((16, 16),), caption="ohwx, {}", replace={"a man": "ohwx man"})
    prior = DataFolder(path=data / "class", weight=0.5, use="prior", caption="a photo of a man")
    found = find_in_folders([own, prior])
    assert [(x.id, x.captions, x.repeats, x.sizes, x.weight, x.use) for x in found.sources] == [
        ("a.png", ("ohwx, ohwx man, smiling",), 3, ((16, 16),), 1.0, "train"),
        ("b.png", ("ohwx, ohwx man", "ohwx, a tall man"), 3, ((16, 16),), 1.0, "train"),
        ("class/a.png", ("a photo of a man",), 1, None, 0.5, "prior"),
    ]
    assert [x.origin for x in found.sources] == ["a.png", "b.png", "class/a.png"]
    with pytest.raises(DataError, match=r"class: none of the 1 files has a caption"):
        find_in_folders([own, DataFolder(path=data / "class")])


def test_a_folder_that_is_given_twice_has_the_same_files(data: Path) -> None:
    folders = [DataFolder(path=data / "own"), DataFolder(path=data / "own", name="large", sizes=((32, 32),))]
    found = find_in_folders(folders).sources
    assert [(x.id, x.origin) for x in found] == [
        ("a.png", "a.png"),
        ("b.png", "b.png"),
        ("large/a.png", "a.png"),
        ("large/b.png", "b.png"),
    ]


def test_names_of_tables(data: Path) -> None:
    Image.new("RGB", (8, 8)).save(data / "x.png")
    (data / "rows.jsonl").write_text('{"file": "x.png", "caption": "an x"}')
    found = find_in_folders([DataFolder(path=path) for path in (data / "own", data / "rows.jsonl")])
    assert [x.id for x in found.sources] == ["a.png", "b.png", "rows/x.png"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (({}, {"path": "own", "name": ""}), r"own and .*own both have the name '' in the cache"),
        (({"name": "x"}, {"name": "x"}), "both have the name 'x'"),
        (({"use": "validation"},), "is set for each of the 1 folders: none is left to train on"),
        (({}, {"use": "validation"}), r"a\.png is in the validation set and is trained on"),
        (({}, {"path": ".", "name": "y/.."}), None),
        (({"path": "."}, {"path": "own"}), r"own/a\.png and .*own/a\.png would both be called own/a\.png"),
    ],
)
def test_what_would_be_ambiguous_is_refused(data: Path, changes: Any, message: str | None) -> None:
    folders = [DataFolder(**{**change, "path": data / change.get("path", "own")}) for change in changes]
    if message is None:
        assert len(find_in_folders(folders).sources) == 4
        return
    with pytest.raises(DataError, match=message):
        find_in_folders(folders)


def _settings(path: Any) -> list[dict[str, Any]]:
    return data_folders(OmegaConf.create({"data": {"path": path}}))


def test_settings_of_folders(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    assert _settings("own") == [{"path": str(data / "own")}]
    several = _settings(["own", {"path": "class", "weight": 0.5, "sizes": [[8, 16]], "replace": {"a": ""}}])
    assert [DataFolder(**one) for one in several] == [
        DataFolder(path=data / "own"),
        DataFolder(path=data / "class", weight=0.5, sizes=((8, 16),), replace={"a": ""}),
    ]
    assert _settings({"path": "own", "repeats": 2}) == [{"path": str(data / "own"), "repeats": 2}]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone", "data.path={tmp}/gone does not exist: it must be a folder of media, or a .csv or .jsonl table"),
        ("a.tar", "data.path=a.tar is not valid: must be a folder of media, or a .csv or .jsonl table; convert .tar"),
        ([{"path": "x.PARQUET"}], "data.path[0].path=x.PARQUET is not valid"),
        ([], "data.path=[] is not valid"),
        (["own", "gone"], "data.path[1]={tmp}/gone does not exist"),
        (["own", {"path": "own/a.png"}], "data.path[1].path={tmp}/own/a.png is not valid"),
        ([{"repeats": 2}], "data.path[0] has no path"),
        ([{"path": "own", "wieght": 2}], "data.path[0] has the unknown setting wieght: a folder has the settings path"),
        ([{"path": "own", "weight": 0}], "data.path[0].weight=0 is not valid: must be a number more than 0"),
        ([{"path": "own", "repeats": 0}], "data.path[0].repeats=0 is not valid"),
        ([{"path": "own", "use": "test"}], "data.path[0].use=test is not valid: must be one of train, prior"),
        ([{"path": "own", "sizes": [[480]]}], "data.path[0].sizes=[[480]] is not valid: must be null or a list of"),
        ([{"path": "own", "replace": {"": "x"}}], "data.path[0].replace={{'': 'x'}} is not valid"),
        ([{"path": "own", "name": "/x"}], "data.path[0].name=/x is not valid"),
        ([3], "data.path[0]=3 is not valid: must be a folder of media"),
    ],
)
def test_invalid_settings_are_named(data: Path, monkeypatch: pytest.MonkeyPatch, path: Any, message: str) -> None:
    monkeypatch.chdir(data)
    with pytest.raises(SettingsError) as error:
        _settings(path)
    assert message.format(tmp=data) in str(error.value)
