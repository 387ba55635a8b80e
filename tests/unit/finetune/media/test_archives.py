"""Archives: tar files of webdataset and parquet files are unpacked once, and read like folders."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lightning_cp.errors import DataError
from lightning_cp.locks import lock, unlock
from lightning_cp.media import DataFolder, Source, find_in_folders, read_image


def _picture(level: int, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8), (level,) * 3).save(out, kind)
    return out.getvalue()


def _tar(path: Path, members: dict[str, bytes | str]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def _found(tmp_path: Path, path: Path, **settings: Any) -> list[tuple[Source, int]]:
    """Sources, and the level of their pixels."""
    found = find_in_folders([DataFolder(path=path, **settings)], unpack_to=tmp_path / "out_media")
    return [(source, int(read_image(source.file)[0, 0, 0])) for source in found.sources]


def test_shards_of_webdataset(tmp_path: Path) -> None:
    for shard in (0, 1):
        members: dict[str, bytes | str] = {
            "0001.png": _picture(10 + shard),
            "0001.txt": "a cat\n",
            "0001.mask.png": _picture(255),
            "sub/0002.jpg": _picture(20 + shard, "JPEG"),
            "sub/0002.json": json.dumps({"caption": "a\ndog", "prompt": ["one", "two"]}),
            "0003.png": _picture(30),
            ".hidden.png": _picture(40),
            "0003.cls": "5",
        }
        _tar(tmp_path / "shards" / f"{shard:05d}.tar", members)
    found = _found(tmp_path, tmp_path / "shards" / "*.tar")
    assert [(source.id, source.captions, level) for source, level in found] == [
        ("00000/0001.png", ("a cat",), 10),
        ("00000/sub/0002.jpg", ("a dog",), 20),
        ("00001/0001.png", ("a cat",), 11),
        ("00001/sub/0002.jpg", ("a dog",), 21),
    ]
    assert [source.mask is not None for source, _ in found] == [True, False, True, False]
    named = _found(tmp_path, tmp_path / "shards" / "*.tar", caption_column="prompt")
    assert [source.captions for source, _ in named][1] == ("one", "two")


def test_archives_that_have_not_changed_are_not_unpacked_again(tmp_path: Path) -> None:
    path = _tar(tmp_path / "shards" / "a.tar", {"x.png": _picture(1), "x.txt": "an x"})
    ((source, _),) = _found(tmp_path, path)
    before = source.file.stat()
    assert _found(tmp_path, path)[0][0].file.stat() == before
    (tmp_path / "out_media" / f".tmp-{source.file.parents[1].name}").mkdir()  # of a killed run
    _tar(path, {"y.png": _picture(2), "y.txt": "a y"})
    os.utime(path, ns=(1, 1))
    assert [(one.id, level) for one, level in _found(tmp_path, path)] == [("a/y.png", 2)]
    assert [one.name for one in (tmp_path / "out_media").iterdir()] == [source.file.parents[1].name]
    descriptor, _ = lock(tmp_path / "out_media")
    with pytest.raises(DataError, match=r"another run unpacks archives to .*out_media"):
        _found(tmp_path, path)
    unlock(descriptor)


def test_hostile_and_damaged_archives_write_nothing_elsewhere(tmp_path: Path) -> None:
    for name in ("../outside.png", "/tmp/outside_of_the_archive.png", "a/../../outside.png"):
        path = _tar(tmp_path / "shards" / "a.tar", {name: _picture(1)})
        with pytest.raises(DataError, match=r"a\.tar: .*outside.* names must be relative"):
            _found(tmp_path, path)
    with tarfile.open(path, "w") as archive:  # a file through a link
        link = tarfile.TarInfo("out")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        archive.addfile(link)
        info = tarfile.TarInfo("out/outside.png")
        info.size = len(_picture(1))
        archive.addfile(info, io.BytesIO(_picture(1)))
        pipe = tarfile.TarInfo("pipe.png")
        pipe.type = tarfile.FIFOTYPE
        archive.addfile(pipe)
    assert [source.id for source, _ in _found(tmp_path, path, caption="x")] == ["a/out/outside.png"]
    assert not (tmp_path / "outside.png").exists()
    path.write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"a\.tar cannot be unpacked to .*: "):
        _found(tmp_path, path)
    for pattern, reason in (("*.tar.gone", "does not exist"), ("b*.tar", "names no archives"), ("b.tar", "cannot be")):
        with pytest.raises(DataError, match=reason):
            _found(tmp_path, tmp_path / "shards" / pattern)


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"needs the package pyarrow.*pip install 'pyarrow>=17'"):
        _found(tmp_path, tmp_path / "a.parquet")


def test_parquet_files_of_hugging_face(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    images = [
        {"bytes": _picture(10), "path": "a.png"},
        {"bytes": _picture(20, "JPEG"), "path": None},
        {"bytes": None, "path": "own.png"},
    ]
    Image.new("RGB", (8, 8), (30,) * 3).save(tmp_path / "own.png")
    for shard in (0, 1):
        columns = {
            "image": images if shard == 0 else images[:2] * 2,
            "file_name": ["w", "x", "y", "z"],
            "text": ["a cat", "a dog\nin the snow", "own", "x"],
            "prompt": [["one", "two"]] * 4,
            "repeats": [1, 2, None, 1],
            "mask": [_picture(255), None, None, None],
            "score": [0.5, 0.5, None, 0.0],
        }
        columns = {name: list(values)[: 3 + shard] for name, values in columns.items()}
        parquet.write_table(pyarrow.table(columns), tmp_path / f"train-{shard}.parquet", row_group_size=2)
    found = _found(tmp_path, tmp_path / "train-*.parquet", name="set")
    first = [(one.id, one.captions, one.repeats, one.mask is not None, level) for one, level in found[:3]]
    assert first[0] == ("set/train-0/00000000.png", ("a cat",), 1, True, 10)
    assert first[1] == ("set/train-0/00000001.jpg", ("a dog\nin the snow",), 2, False, 20)
    prompts = _found(tmp_path, tmp_path / "train-*.parquet", caption_column="prompt")
    assert prompts[0][0].captions == ("one", "two")
    assert first[2][1:] == (("own",), 1, False, 30)


def test_parquet_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    for columns, reason in (
        ({"text": ["x"], "a": [b"1"], "b": [b"2"]}, "must have one column of media .* got a, b of text, a, b"),
        ({"text": ["x"]}, "must have one column of media .* got none of text"),
        ({"image": [None], "text": ["x"]}, "row 0: has neither the bytes nor the path"),
        ({"image": [{"bytes": None, "path": None}], "text": ["x"]}, "row 0: has neither the bytes nor the path"),
        ({"image": [b"no picture"], "text": ["x"]}, r"00000000\.bin has an unknown suffix"),
    ):
        parquet.write_table(pyarrow.table(columns), path)
        with pytest.raises(DataError, match=reason):
            _found(tmp_path, path)
    path.write_bytes(b"PAR1 no parquet")
    with pytest.raises(DataError, match=r"a\.parquet is damaged, or no parquet file"):
        _found(tmp_path, path)
