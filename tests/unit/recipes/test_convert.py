"""Archives are converted to folders that `data.path` reads, completely or not at all."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lightning_cp.errors import DataError
from lightning_cp.finetune.media.archives import convert_archives
from lightning_cp.media import find_sources, read_image
from lightning_cp.recipes import convert


@pytest.fixture(autouse=True)
def _variable_of_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import sets this."""
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "TRUE")


def picture(level: int, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8), (level,) * 3).save(out, kind)
    return out.getvalue()


def tar(path: Path, members: dict[str, bytes | str], links: tuple[str, ...] = ()) -> Path:
    with tarfile.open(path, "w") as archive:
        for name in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(info)
        for name, content in members.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def parquet(path: Path, **columns: list[Any]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["lightning-cp convert", *map(str, arguments)])
    return convert.main()


def found(folder: Path) -> list[tuple[str, tuple[str, ...], bool, int]]:
    """Files, captions, whether there is a mask, and the level of the pixels."""
    sources = find_sources(folder, captions="optional").sources
    return [(x.id, x.captions, x.mask is not None, int(read_image(x.file)[0, 0, 0])) for x in sources]


def test_webdataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = json.dumps({"caption": "a\ndog", "prompt": ["one", "two"]})
    tar(tmp_path / "0.tar", {f"{i}.{end}": x for i in range(6) for end, x in (("png", picture(i)), ("txt", "a cat"))})
    members = {"a/6.json": facts, "a/6.jpg": picture(60, "JPEG"), "a/6.cls": "5", "7.png": picture(70), "7.json": "[]"}
    tar(tmp_path / "1.tar", {**members, "8.mask.png": picture(255), "8.png": picture(80), ".x.png": b""}, ("9.png",))
    assert command(monkeypatch, tmp_path / "*.tar", tmp_path / "new" / "set") == 0
    assert found(tmp_path / "new" / "set") == [
        *((f"{i:08d}.png", ("a cat",), False, i) for i in range(6)),
        ("00000006.jpg", ("a\ndog",), False, 60),
        ("00000007.png", ("",), False, 70),
        ("00000008.png", ("",), True, 80),
    ]
    one = tar(tmp_path / "one.tar", {"6.json": facts, "6.png": picture(6)})
    assert command(monkeypatch, one, tmp_path / "named", "--caption", "prompt") == 0
    assert found(tmp_path / "named") == [("00000000.png", ("one", "two"), False, 6)]


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [{"bytes": picture(10), "path": "a.png"}, {"bytes": picture(20, "JPEG"), "path": None}]
    columns = {"image": images, "text": ["a cat", None], "prompt": [["one", "two"]] * 2, "repeats": [3, None]}
    first = parquet(tmp_path / "a.parquet", **columns, mask=[picture(255), None], score=[0.5, None])
    second = parquet(tmp_path / "b.parquet", **columns, mask=[None, None], score=[0.5, None])
    assert command(monkeypatch, first, second, tmp_path / "set") == 0
    a, b = (("a cat",), ("",))
    assert [row[1:] for row in found(tmp_path / "set")] == [
        (a, True, 10),
        (b, False, 20),
        (a, False, 10),
        (b, False, 20),
    ]
    assert [x.repeats for x in find_sources(tmp_path / "set", captions="optional").sources] == [3, 1, 3, 1]
    assert command(monkeypatch, first, tmp_path / "named", "--caption", "prompt") == 0
    assert [row[1] for row in found(tmp_path / "named")] == [("one", "two")] * 2


def _cut(path: Path, *, start: int = 0, end: int | None = None, junk: bytes = b"") -> Path:
    content = path.read_bytes()
    path.write_bytes(content[:start] + junk + content[start + len(junk) : end])
    return path


SAMPLES: dict[str, bytes | str] = {f"{i}.png": picture(i) for i in range(3)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: tar(p / "a.tar", {}), "a.tar has no samples"),
        (lambda p: tar(p / "a.tar", {"../x.txt": "x"}), r"sample 0 \(../x\) must have the bytes .* got none"),
        (lambda p: tar(p / "a.tar", {"a.png": picture(1), "a.jpg": picture(1)}), "got png, jpg of|got jpg, png of"),
        (lambda p: tar(p / "a.tar", {"a.png": picture(1), "a.json": '{"text": 3}'}), "its caption 3 must be a text"),
        (lambda p: tar(p / "a.tar", {"a.png": picture(1), "a.json": "{"}), "cannot be converted to .*: Expecting"),
        (lambda p: _cut(tar(p / "a.tar", SAMPLES), start=1024, junk=b"\xff" * 500), "a.tar is damaged at byte 1024"),
        (lambda p: _cut(tar(p / "a.tar", SAMPLES), end=2048), "a.tar is damaged at byte 2048, or was not written"),
        (lambda p: _cut(tar(p / "a.tar", SAMPLES), end=1600), "cannot be converted to .*: unexpected end of data"),
        (lambda p: _cut(parquet(p / "a.parquet", image=[picture(1)]), end=40), r"a\.parquet cannot be converted to"),
        (lambda p: parquet(p / "a.parquet", image=[picture(1), None]), "sample 1 must have the bytes of one picture"),
        (lambda p: parquet(p / "a.parquet", image=[b"<svg>"]), "sample 0 must have the bytes of one picture"),
        (lambda p: p / "gone.tar", "gone.tar cannot be converted to .*: .*No such file"),
        (lambda p: p / "a.zip", r"a\.zip must be \.tar or \.parquet files, all of one kind"),
    ],
)
def test_what_cannot_be_converted_leaves_nothing(tmp_path: Path, make: Any, message: str) -> None:
    (tmp_path / "in").mkdir()
    archive = make(tmp_path / "in")
    with pytest.raises(DataError, match=message) as raised:
        convert_archives([str(archive)], tmp_path / "out" / "set")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_target_that_exists_a_full_disk_and_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tar(tmp_path / "a.tar", SAMPLES)
    assert command(monkeypatch, archive, tmp_path) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} exists: name a new folder\n"
    with pytest.raises(DataError, match=r"sample 0 .* has no caption=title: its columns are"):
        convert_archives([str(archive)], tmp_path / "set", "title")
    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(DataError, match=r"a\.tar cannot be converted to .*set: .*No space left on device"):
            convert_archives([str(archive)], tmp_path / "set")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"lightning-cp convert needs the package datasets.*pip install 'datasets"):
        convert_archives([str(archive)], tmp_path / "set")
    assert list(tmp_path.iterdir()) == [archive]
