"""Archives are converted to folders that `data.path` reads, completely or not at all."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lightning_cp.errors import DataError
from lightning_cp.finetune.media.archives import convert_archives
from lightning_cp.finetune.settings import DataFolder
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


def tar(path: Path, members: dict[str, bytes | str], kind: bytes = tarfile.REGTYPE, **headers: str) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size, info.type, info.pax_headers = len(data), kind, headers
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
    """Suffixes, captions, whether there is a mask, and the level of the pixels."""
    sources = find_sources(folder, captions="optional").sources
    return [(x.file.suffix, x.captions, x.mask is not None, int(read_image(x.file)[0, 0, 0])) for x in sources]


def test_webdataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = json.dumps({"caption": "a\ndog", "prompt": ["one", "two"], "image": "a.png", "repeats": 2})
    tar(tmp_path / "0.tar", {f"{i}.{end}": x for i in range(6) for end, x in (("png", picture(i)), ("txt", "a cat"))})
    members = {"a/6.json": facts, "a/6.jpg": picture(60, "JPEG"), "a/6.cls": "5", "7.png": picture(70), "7.json": "[]"}
    members |= {"README.md": "", "8.mask.PNG": picture(255), "8.png": picture(80), "._8.png": b"", "8.JSON": facts}
    tar(
        tmp_path / "1.tar", {**members, "8.TXT": "\ufeffone \r\n\n two", "9.json": '{"txt": "x"}', "9.png": picture(70)}
    )
    assert command(monkeypatch, tmp_path / "*.tar", tmp_path / "new" / "set") == 0
    assert found(tmp_path / "new" / "set") == [
        *((".png", ("a cat",), False, i) for i in range(6)),
        (".jpg", ("a\ndog",), False, 60),
        (".png", ("",), False, 70),
        (".png", ("one", "two"), True, 80),
        (".png", ("x",), False, 70),
    ]
    sources = find_sources(tmp_path / "new" / "set", captions="optional").sources
    assert [x.repeats for x in sources] == [1] * 6 + [2, 1, 2, 1]
    assert sources[9].id == sources[7].id.replace(".", "-2."), "copies have names of their own"
    assert len(list((tmp_path / "new" / "set").iterdir())) == 12, "only what is used is written"
    assert command(monkeypatch, tmp_path / "1.tar", tmp_path / "one") == 0
    assert [x.id for x in find_sources(tmp_path / "one", captions="optional").sources] == [x.id for x in sources[6:]]
    one = tar(tmp_path / "one.tar", {"6.json": facts, "6.png": picture(6), "6.txt": "no"})
    assert command(monkeypatch, one, tmp_path / "named", "--caption", "prompt") == 0
    assert found(tmp_path / "named") == [(".png", ("one", "two"), False, 6)]


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [{"bytes": picture(10), "path": "a.png"}, {"bytes": picture(20, "JPEG"), "path": None}]
    columns = {"image": images, "text": ["a cat", None], "prompt": [["one", "two"]] * 2, "repeats": [3, None]}
    (tmp_path / "a::b[1]").mkdir()
    first = parquet(tmp_path / "a::b[1]" / "a.parquet", **columns, mask=[picture(255), None], score=[0.5, None])
    second = parquet(tmp_path / "b.parquet", **columns, mask=[None, None], thumbnail=[picture(1)] * 2)
    assert command(monkeypatch, first, second, tmp_path / "set") == 0
    a, b = (("a cat",), ("",))
    assert found(tmp_path / "set") == [
        (".png", a, True, 10),
        (".jpg", b, False, 20),
        (".png", a, False, 10),
        (".jpg", b, False, 20),
    ]
    assert [x.repeats for x in find_sources(tmp_path / "set", captions="optional").sources] == [3, 1, 3, 1]
    assert command(monkeypatch, first, tmp_path / "named", "--caption", "prompt") == 0
    assert [row[1] for row in found(tmp_path / "named")] == [("one", "two")] * 2


@pytest.mark.parametrize("kind", ["JPEG", "MPO", "PNG", "GIF", "BMP", "TIFF", "WEBP", "AVIF"])
def test_bytes_without_a_name_get_the_suffix_of_their_kind(tmp_path: Path, kind: str) -> None:
    convert_archives([str(parquet(tmp_path / "a.parquet", photo=[picture(255, kind)], id=[b"1"]))], tmp_path / "set")
    suffixes = {"JPEG": ".jpg", "MPO": ".jpg", "TIFF": ".tif"}
    assert found(tmp_path / "set") == [(suffixes.get(kind, f".{kind.lower()}"), ("",), False, 255)]


def test_a_path_that_exists_is_no_pattern_and_help_needs_no_torch(tmp_path: Path) -> None:
    for level, name in enumerate(("a1", "a[1]")):
        tar(tmp_path / f"{name}.tar", {"0.png": picture(level)})
    assert convert_archives([str(tmp_path / "a[1].tar")], tmp_path / "photos.tar") == 1
    assert DataFolder(path=tmp_path / "photos.tar").path == tmp_path / "photos.tar"
    assert found(tmp_path / "photos.tar")[0][3] == 1
    code = "import sys, lightning_cp.recipes.convert; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def _cut(path: Path, *, start: int = 0, end: int | None = None, junk: bytes = b"") -> Path:
    content = path.read_bytes()
    path.write_bytes(content[:start] + junk + content[start + len(junk) : end])
    return path


SAMPLES: dict[str, bytes | str] = {f"{i}.png": picture(i) for i in range(3)}
HEIC = b"\0\0\0\x18ftypheic" + bytes(12)
SPARSE = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "0,1", "GNU.sparse.size": "1"}


def _with(path: Path, **more: bytes | str) -> Path:
    return tar(path / "a.tar", {"0.png": picture(1), **{f"0.{x.replace('_', '.')}": y for x, y in more.items()}})


def _joined(path: Path) -> Path:
    archive = tar(path / "a.tar", SAMPLES)
    archive.write_bytes(archive.read_bytes() * 2)
    return archive


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: tar(p / "a.tar", {"README.md": ""}), "a.tar has no samples"),
        (lambda p: tar(p / "a.tar", {"../x.txt": "x"}), r"a.tar, sample '../x' must have the bytes of .* got none"),
        (lambda p: _with(p, jpg=picture(1)), "a.tar: '0.jpg' must be the only NAME"),
        (lambda p: _with(p, mask_png=picture(1), mask_jpg=picture(1)), "'0.mask.jpg' must be the only NAME"),
        (lambda p: _with(p, reference1_png=picture(1)), "'0.reference1.png' must be the only NAME"),
        (lambda p: _with(p, mask_mp4=b""), r"sample '0': mask=\w+\.mp4 must be an image"),
        (lambda p: tar(p / "a.tar", {"0.png": ""}, tarfile.SYMTYPE), "'0.png' must be .* no link"),
        (lambda p: tar(p / "a.tar", {"0.png": "x"}, **SPARSE), "'0.png' must be .* not sparse"),
        (lambda p: _with(p, txt="x" * (1 << 20) + "x"), "'0.txt' must be .* at most 1048576 bytes"),
        (lambda p: _with(p, txt=b"\xff"), "a.tar, sample '0': its text or JSON is not valid .'utf-8' codec"),
        (lambda p: _with(p, json="{"), r"sample '0': its text or JSON is not valid \(Expecting"),
        (lambda p: _with(p, json='{"text": 3}'), "sample '0': caption=3 must be a text"),
        (lambda p: _with(p, json='{"mask": "m.png"}'), "sample '0' must have the bytes of .* any reference and mask"),
        (lambda p: _with(p, json='{"frames": 5}'), "sample '0': frames can only be given for videos"),
        (lambda p: tar(p / "a.tar", {"0.mp4": "", "0.json": '{"end_s": NaN}'}), "sample '0': end_s=nan must be a num"),
        (lambda p: _cut(tar(p / "a.tar", SAMPLES), start=1024, junk=b"\xff" * 500), "a.tar is damaged at byte 1024"),
        (lambda p: _cut(tar(p / "a.tar", SAMPLES), end=2048), "a.tar is damaged at byte 2048, was not written"),
        (_joined, "a.tar is damaged at byte 3072, .* or has more after it"),
        (lambda p: _cut(tar(p / "a.tar", SAMPLES), end=1600), "cannot be converted to .*: unexpected end of data"),
        (lambda p: _cut(parquet(p / "a.parquet", image=[picture(1)]), end=40), r"a\.parquet cannot be converted to"),
        (lambda p: parquet(p / "a.parquet", image=[picture(1), None]), "row 1 must have the bytes of 1 picture"),
        (
            lambda p: parquet(p / "a.parquet", image=[None], thumb=[picture(1)]),
            "row 0 must have the bytes of 1 picture",
        ),
        (lambda p: parquet(p / "a.parquet", a=[picture(1)], b=[picture(1)]), "row 0 must have .*, got a, b"),
        (lambda p: parquet(p / "a.parquet", image=[HEIC]), "row 0 must have the bytes of 1 picture"),
        (
            lambda p: parquet(p / "a.parquet", image=[picture(1)], mask=[b"<svg>"]),
            "row 0 must .* any reference and mask",
        ),
        (lambda p: p / "gone.tar", r"gone.tar names no file: expected \.tar or \.parquet files"),
        (lambda p: tar(p / "a.zip", {}), r"names .*a\.zip: expected \.tar or \.parquet files"),
    ],
)
def test_what_cannot_be_converted_leaves_nothing(
    tmp_path: Path, make: Any, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    archive = make(tmp_path / "in")
    with pytest.raises(DataError, match=message) as raised:
        convert_archives([str(archive)], tmp_path / "out" / "set")
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_target_that_exists_a_full_disk_and_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tar(tmp_path / "a.tar", SAMPLES)
    assert command(monkeypatch, archive, tmp_path) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} exists: name a new folder\n"
    with pytest.raises(DataError, match=r"a\.tar, sample '0' has no caption=title: its columns are"):
        convert_archives([str(archive)], tmp_path / "set", "title")
    with monkeypatch.context() as full:
        full.setattr("shutil.copyfileobj", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(DataError, match=r"a\.tar cannot be converted to .*set: .*No space left on device"):
            convert_archives([str(archive)], tmp_path / "set")
    monkeypatch.setitem(sys.modules, "datasets", None)
    table = parquet(tmp_path / "a.parquet", image=[picture(1)])
    with pytest.raises(DataError, match=r"lightning-cp convert needs the package datasets.*pip install 'datasets"):
        convert_archives([str(table)], tmp_path / "set")
    assert {*tmp_path.iterdir()} == {archive, table}
