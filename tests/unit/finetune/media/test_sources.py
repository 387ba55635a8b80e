"""Folders and tables are read as sources with stable ids. Errors in them are named with file and line."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lightning_cp.errors import DataError, MediaError
from lightning_cp.finetune.media.source import Entry
from lightning_cp.finetune.media.table import COLUMNS
from lightning_cp.media import Skipped, Source, find_sources
from tests.unit.finetune.media.encode import grey_frames, write_video


def picture(file: Path, caption: str | None = "a cat") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4)).save(file)
    if caption is not None:
        file.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return file


def table(folder: Path, *rows: Any, name: str = "data.jsonl") -> Path:
    file = folder / name
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    file.write_text(text, encoding="utf-8", newline="")
    return file


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        find_sources(path, **options)
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    picture(folder / "b.png", "a cat\n\n  a small cat  \n")
    picture(folder / "a" / "é 猫.JPG", "\ufeffwindows\r\nline ends\u2028inside\r\n")
    picture(folder / "z.jpg", None)
    picture(folder / ".hidden.png")
    picture(folder / ".git" / "x.png")
    (folder / "notes.md").write_text("x")
    (folder / "orphan.txt").write_text("x")
    (folder / "meta.csv").write_text("file\n")
    picture(folder / "x.png" / "inside.webp")  # a folder with the name of an image
    (folder / "gone.png").symlink_to("nowhere.png")
    (folder / "a" / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe.png")
    return folder


def test_a_folder(folder: Path) -> None:
    found = find_sources(folder)
    assert found.sources == (
        Source("a/é 猫.JPG", folder / "a" / "é 猫.JPG", ("windows", "line ends\u2028inside"), origin="a/é 猫.JPG"),
        Source("b.png", folder / "b.png", ("a cat", "a small cat"), origin="b.png"),
        Source("x.png/inside.webp", folder / "x.png" / "inside.webp", ("a cat",), origin="x.png/inside.webp"),
    )
    assert set(found.skipped) == {
        Skipped(folder / "a" / "loop", f"a link to a folder that is read already, as {folder}"),
        Skipped(folder / "gone.png", "a link to a file that does not exist"),
        Skipped(folder / "meta.csv", "a table: give its path instead of the folder's to use it"),
        Skipped(folder / "notes.md", "files with the suffix .md are not used"),
        Skipped(folder / "orphan.txt", "no image or video has this name"),
        Skipped(folder / "pipe.png", "not a regular file"),
        Skipped(folder / "z.jpg", "no caption: z.txt is missing or empty"),
    }
    optional = find_sources(folder, captions="optional").sources
    assert [(source.id, source.captions) for source in optional][-1] == ("z.jpg", ("",))


def test_ids_do_not_depend_on_the_place(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [source.id for source in find_sources(folder).sources]
    moved = shutil.move(folder, tmp_path / "elsewhere")
    assert [source.id for source in find_sources(moved).sources] == ids
    monkeypatch.chdir(moved)
    assert [source.id for source in find_sources(".").sources] == ids
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [source.id for source in find_sources("~/elsewhere").sources] == ids


def test_a_link_to_another_folder_is_followed(tmp_path: Path) -> None:
    picture(tmp_path / "other" / "a.png")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "other")
    assert [source.id for source in find_sources(tmp_path / "data").sources] == ["linked/a.png"]


def test_a_name_that_is_not_unicode_is_skipped(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    shutil.copy(tmp_path / "a.png", os.fsencode(tmp_path) + b"/\xff.png")
    (skipped,) = find_sources(tmp_path).skipped
    assert skipped.reason == "its name is not UTF-8: rename it"


def test_folders_without_anything_to_train_on(tmp_path: Path) -> None:
    message = refused(tmp_path / "missing")
    assert "does not exist: must be a folder of media, or a .csv or .jsonl table; convert .tar" in message
    assert "no usable file. Usable are images: .avif .bmp" in refused(tmp_path)
    (tmp_path / "a.heic").write_bytes(b"x")
    message = refused(tmp_path)
    assert "no usable file (1 skipped, such as a.heic: files with the suffix .heic are not used)" in message
    picture(tmp_path / "a.png", "\n \n")
    message = refused(tmp_path)
    assert "none of the 1 files has a caption (no caption: a.txt is missing or empty)" in message
    assert "set data.captions=optional to train with the empty caption" in message
    assert find_sources(tmp_path, captions="optional").sources[0].captions == ("",)
    assert "a.png is not valid: must be a folder of media" in refused(tmp_path / "a.png")


def test_captions_must_be_utf8(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "a.txt").write_bytes("Käse".encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 text \(byte 0xe4 at offset 1\): save it"):
        find_sources(tmp_path)
    (tmp_path / "a.txt").write_text("a cat", encoding="utf-16")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 text"):
        find_sources(tmp_path)
    for name in ("b", "sub/c", "d"):  # all of them are named at once
        (tmp_path / name).parent.mkdir(exist_ok=True)
        picture(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_bytes(b"a dog" if name == "d" else b"a\xffb")
    with pytest.raises(DataError) as raised:
        find_sources(tmp_path)
    named = [name for name in ("a", "b", "c", "d") if f"{name}.txt is not UTF-8 text" in str(raised.value)]
    assert named == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["a.txt", "inner"])
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the operating system's refusal is simulated."""
    picture(tmp_path / "a.png")
    (tmp_path / "inner").mkdir()
    opened, listed = os.open, os.scandir

    def deny(path: Any, call: Any, *more: Any) -> Any:
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return call(path, *more)

    monkeypatch.setattr(os, "open", lambda path, flags, *more: deny(path, opened, flags, *more))
    monkeypatch.setattr(os, "scandir", lambda path: deny(path, listed))
    with pytest.raises(DataError, match=f"{name} cannot be read: Permission denied"):
        find_sources(tmp_path)


def test_jsonl(tmp_path: Path) -> None:
    picture(tmp_path / "set" / "a.png", None)
    picture(tmp_path / "outside.png", None)
    picture(tmp_path / "set" / "sub" / "before.png", None)
    for name in ("v.mp4", "w.mp4"):
        (tmp_path / "set" / name).write_bytes(b"")  # is not opened
    file = table(
        tmp_path / "set",
        "\ufeff" + json.dumps({"file": "v.mp4", "caption": "x", "start_s": 2.5, "end_s": 4}),
        "\r",
        {"file": "v.mp4", "caption": "x", "start_s": 4.0},
        {"file": "w.mp4", "captions": ["one", " two \u2028", ""], "repeats": 3, "end_s": None},
        {"file": "../outside.png", "caption": "out"},
        {"file": str(tmp_path / "set" / "a.png"), "caption": "in", "reference": "./sub/before.png"},
        {"file": "missing.png", "caption": "?"},
        {"file": "sub/../sub/before.png", "caption": "  "},
    )
    found = find_sources(file)
    root = tmp_path / "set"
    assert found.sources == (
        Source("v.mp4#2.5-4", root / "v.mp4", ("x",), start_s=2.5, end_s=4.0, origin="v.mp4"),
        Source("v.mp4#4-", root / "v.mp4", ("x",), start_s=4.0, origin="v.mp4"),
        Source("w.mp4", root / "w.mp4", ("one", "two"), repeats=3, origin="w.mp4"),
        Source("../outside.png", tmp_path / "outside.png", ("out",), origin=str(tmp_path / "outside.png")),
        Source("a.png", root / "a.png", ("in",), reference=root / "sub" / "before.png", origin="a.png"),
    )
    assert found.skipped == (
        Skipped(root / "missing.png", f"does not exist ({file}, line 7)"),
        Skipped(root / "sub" / "before.png", f"no caption in {file}, line 8"),
    )


def test_csv_with_quotes_and_newlines(tmp_path: Path) -> None:
    for name in ("a.png", "b, c.png", "d.png"):
        picture(tmp_path / name, None)
    rows = [
        "\ufefffile,caption,captions,repeats",
        'a.png,"two\r\nlines, ""quoted""",,',
        "",
        '"b, c.png",,"[""one"", ""two""]",2',
        "d.png,  ,,",
    ]
    file = tmp_path / "data.CSV"
    file.write_text("\r\n".join(rows) + "\r\n", encoding="utf-8", newline="")
    found = find_sources(file, captions="optional")
    assert [(s.id, s.captions, s.repeats) for s in found.sources] == [
        ("a.png", ('two\r\nlines, "quoted"',), 1),
        ("b, c.png", ("one", "two"), 2),
        ("d.png", ("",), 1),
    ]
    table(tmp_path, "file,caption", 'a.png,"x\ny"', "d.png,1,2", name="e.csv")
    assert "e.csv, line 4: expected 2 cells (file, caption), got 3" in refused(tmp_path / "e.csv")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("{file: a.png}", "line 1: not valid JSON"),
        ("[" * 100000, "line 1: not valid JSON"),
        ('["a.png"]', "expected an object"),
        ({"caption": "x"}, "keys must include file, got caption"),
        ({"file": "", "caption": "x"}, "file='' must be a path"),
        ({"file": None}, "file is missing"),
        ({"file": 3}, "file=3 must be a path"),
        ({"file": "a\0.png", "caption": "x"}, "no usable file (1 skipped, such as a\0.png: does not exist"),
        ({"file": "x" * 5000 + ".png", "caption": "x"}, "does not exist"),
        ({"file": "a.psd"}, "file=a.psd has an unknown suffix; usable are images: .avif"),
        ({"file": "a.png", "text": "x"}, "unknown keys 'text'; valid: file, caption"),
        ({"file": "a.png", "caption": "x", "captions": ["y"]}, "give caption or captions, not both"),
        ({"file": "a.png", "captions": "y"}, "captions='y' must be a list of"),
        ({"file": "a.png", "captions": ["y", 3]}, "each a text"),
        ({"file": "a.png", "caption": "\ud800"}, "must be a text"),
        ({"file": "a.png", "caption": 3}, "caption=3 must be a text"),
        ({"file": "a.png", "caption": ["x", 3]}, "must be a text"),
        ({"file": "a.png", "repeats": 0}, "repeats=0 must be a whole number"),
        ({"file": "a.png", "repeats": 1.5}, "repeats=1.5 must be a whole number"),
        ({"file": "a.png", "repeats": True}, "repeats=True must be a whole number"),
        ({"file": "a.png", "repeats": "9" * 5000}, "must be a whole number"),
        ({"file": "a.png", "start_s": 1}, "start_s can only be given for videos, but a.png is an image"),
        ({"file": "v.mp4", "start_s": -1}, "start_s=-1 must be a number at least 0"),
        ({"file": "v.mp4", "start_s": "soon"}, "start_s='soon' must be a number at least 0"),
        ('{"file": "v.mp4", "end_s": NaN}', "end_s=nan must be a number at least 0"),
        ({"file": "v.mp4", "end_s": 10**400}, "must be a number at least 0"),
        ({"file": "v.mp4", "start_s": 3, "end_s": 3}, "end_s=3 must be greater than start_s=3"),
        ({"file": "v.mp4", "start_s": 3, "frames": 9}, "as start_s and end_s, or as start_frame and frames, not both"),
        ({"file": "v.mp4", "start_frame": 3}, "start_frame needs frames"),
        ({"file": "v.mp4", "frames": 0}, "frames=0 must be a whole number"),
        ({"file": "v.mp4", "start_frame": -1, "frames": 2}, "start_frame=-1 must be a whole number, at least 0"),
        ({"file": "a.png", "mask": "v.mp4"}, "mask=v.mp4 must be an image"),
        ({"file": "a.png", "reference": "v.txt"}, "reference=v.txt must be an image or a video"),
        (
            {"file": "a.png", "reference": ["b.png", "c.png"]},
            "reference=['b.png', 'c.png'] is a list: training takes one",
        ),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: Any, expected: str) -> None:
    picture(tmp_path / "a.png", None)
    (tmp_path / "v.mp4").write_bytes(b"")
    message = refused(table(tmp_path, row))
    assert expected in message
    assert "line 1" in message


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], "is empty: expected a header"),
        (["file,caption,text"], "line 1: unknown columns 'text'; valid: file, caption, captions"),
        (["file;caption"], "unknown columns 'file;caption'"),
        (["file;caption"], "separate columns by commas"),
        (["file,caption,file"], "columns file occur more than once"),
        (["", "caption"], "line 2: columns must include file"),
        (["file,caption", "a.png"], "line 2: expected 2 cells"),
        (["file,caption", 'a.png,"x', "y"], "line 2: not valid CSV"),
        (["file,caption", 'a.png,"x"y'], "line 2: not valid CSV"),
        (["file,repeats", "a.png,two"], "line 2: repeats='two' must be a whole number"),
        (["file,captions", "a.png,two"], "line 2: captions='two' must be a list of"),
        (["file,caption", "a.png," + "x" * 200000], "line 2: not valid CSV (field larger"),
    ],
)
def test_a_bad_csv_is_named(tmp_path: Path, rows: list[str], expected: str) -> None:
    picture(tmp_path / "a.png", None)
    assert expected in refused(table(tmp_path, *rows, name="data.csv"))


def test_a_table_that_is_not_text(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", None).rename(tmp_path / "data.csv")
    assert "data.csv is not UTF-8 text (byte 0x89 at offset 0)" in refused(tmp_path / "data.csv")


def test_duplicates_name_both_rows(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", None)
    file = table(tmp_path, {"file": "a.png", "caption": "x"}, "", {"file": "./a.png", "caption": "y"})
    message = refused(file)
    assert f"{file}, line 3: a.png was already given in {file}, line 1" in message
    assert "captions as a list" in message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"captions": "none"}, "captions=none must be one of required, optional"),
        ({"clips": "all"}, "set clip_frames to 1 or more, got None"),
        ({"clips": "all", "clip_frames": 0}, "set clip_frames to 1 or more, got 0"),
        ({"fps": 0.0}, "fps=0.0 must be"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        find_sources(tmp_path, **options)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """long.mp4 with 60 frames and short.mkv with 10, at 24 frames per second; a damaged file; an image."""
    folder = tmp_path_factory.mktemp("videos")
    write_video(folder / "long.mp4", grey_frames(60))
    write_video(folder / "short.mkv", grey_frames(10))
    (folder / "bad.mp4").write_bytes(b"x" * 99)
    picture(folder / "a.png")
    for name in ("long", "short", "bad"):
        (folder / f"{name}.txt").write_text(name)
    return folder


def test_a_video_is_cut_into_all_its_clips(videos: Path) -> None:
    found = find_sources(videos, clips="all", clip_frames=17)
    assert [source.id for source in found.sources] == [
        "a.png",
        "long.mp4#0-0.708333",
        "long.mp4#0.708333-1.416667",
        "long.mp4#1.416667-2.125",
    ]
    assert [source.captions for source in found.sources] == [("a cat",), *[("long",)] * 3]
    reasons = {skipped.file.name: skipped.reason for skipped in found.skipped}
    assert reasons["short.mkv"].startswith(
        "has 10 frames at 24 frames per second, fewer than the 17 of a clip (clip_frames;"
    )
    assert reasons["bad.mp4"].startswith("cannot be decoded (InvalidDataError")
    slower = find_sources(videos, clips="all", clip_frames=5, fps=12).sources
    assert [source.id for source in slower if "long" in source.id][-1] == "long.mp4#2.083333-2.5"
    assert [source.id for source in slower if "short" in source.id] == ["short.mkv#0-0.416667"]
    assert [source.id for source in find_sources(videos).sources] == ["a.png", "bad.mp4", "long.mp4", "short.mkv"]


def test_ranges_in_a_table_are_cut(videos: Path) -> None:
    rows = [
        {"file": "long.mp4", "caption": "s", "start_s": 0.5, "end_s": 1.0},
        {"file": "long.mp4", "caption": "f", "start_frame": 24, "frames": 12},
        {"file": "long.mp4", "caption": "f", "start_frame": 55, "frames": 6},
    ]
    file = table(videos, *rows)
    found = find_sources(file)
    assert [(s.id, s.start_s, s.end_s) for s in found.sources] == [
        ("long.mp4#0.5-1", 0.5, 1.0),
        ("long.mp4#frame24+12", 1.0, 1.5),
    ]
    (skipped,) = found.skipped
    assert skipped.reason == "has 60 frames, but start_frame=55 and frames=6 need 61"
    cut = find_sources(file, clips="all", clip_frames=5).sources
    assert [s.id for s in cut] == [
        "long.mp4#0.5-0.708333",
        "long.mp4#0.708333-0.916667",
        "long.mp4#1-1.208333",
        "long.mp4#1.208333-1.416667",
    ]
    overlapping = table(videos, rows[0], {**rows[0], "end_s": 1.1}, name="overlapping.jsonl")
    message = refused(overlapping, clips="all", clip_frames=5)
    assert "line 2: long.mp4#0.5-0.708333 was already given in" in message


def test_without_pyav_videos_are_refused_at_once(videos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MediaError, match="pip install 'av"):
        find_sources(videos)


def test_the_columns_are_those_of_a_source() -> None:
    fields = set(Source.__dataclass_fields__) - {"id", "origin", "sizes", "weight", "use"} | {
        "caption",
        "start_frame",
        "frames",
    }
    assert set(COLUMNS) == fields
    assert "frame_range" in Entry.__dataclass_fields__


@pytest.mark.parametrize("name", ["a.reference2.png", "a.reference.2.jpg", "a.reference_1.png", "v.reference-1.png"])
def test_several_references_are_refused(name: str, tmp_path: Path) -> None:
    picture(tmp_path / "a.png", "a cat")
    (tmp_path / "v.mp4").touch()
    picture(tmp_path / name)
    assert f"{name} is one of several references of {name[0]}: training takes one reference" in refused(tmp_path)


def test_a_name_like_a_numbered_reference_is_a_picture_if_nothing_belongs_to_it(tmp_path: Path) -> None:
    picture(tmp_path / "data" / "a.reference2.png", "a cat")
    assert [source.id for source in find_sources(tmp_path / "data").sources] == ["a.reference2.png"]


def test_references_of_a_folder(tmp_path: Path) -> None:
    names = ("a.png", "a.reference.jpg", "b.png", "sub/a.png", "c.reference.png")
    for name in names:
        picture(tmp_path / "data" / name, None if "reference" in name else "a cat")
    for name in ("v.mp4", "v.reference.mov"):
        (tmp_path / "data" / name).write_bytes(b"")
    (tmp_path / "data" / "v.txt").write_text("a clip")
    found = find_sources(tmp_path / "data")
    references = {source.id: source.reference and source.reference.name for source in found.sources}
    assert references == {"a.png": "a.reference.jpg", "b.png": None, "sub/a.png": None, "v.mp4": "v.reference.mov"}
    assert [(one.file.name, one.reason) for one in found.skipped] == [
        ("c.reference.png", "a reference, but no image or video is called c")
    ]
    picture(tmp_path / "data" / "a.reference.png")
    assert "a.reference.png and a.reference.jpg are both references of a: training takes one" in refused(
        tmp_path / "data"
    )


def test_masks_of_a_folder_and_of_a_table(tmp_path: Path) -> None:
    for name in ("a.png", "a.mask.png", "b.png", "b.mask.jpg", "b.reference.png", "c.mask.png"):
        picture(tmp_path / "data" / name, "a cat" if "." not in name[:-4] else None)
    (tmp_path / "data" / "v.mp4").write_bytes(b"")
    (tmp_path / "data" / "v.txt").write_text("a clip")
    picture(tmp_path / "data" / "v.mask.png", None)
    found = find_sources(tmp_path / "data")
    masks = {source.id: source.mask and source.mask.name for source in found.sources}
    assert masks == {"a.png": "a.mask.png", "b.png": "b.mask.jpg", "v.mp4": "v.mask.png"}
    assert [source.files for source in found.sources][1] == tuple(
        tmp_path / "data" / name for name in ("b.png", "b.reference.png", "b.mask.jpg")
    )
    assert [(one.file.name, one.reason) for one in found.skipped] == [
        ("c.mask.png", "a mask, but no image or video is called c")
    ]
    rows = table(tmp_path / "data", {"file": "b.png", "caption": "x", "mask": "a.mask.png"})
    assert [source.mask for source in find_sources(rows).sources] == [tmp_path / "data" / "a.mask.png"]
    rows = table(tmp_path / "data", {"file": "b.png", "caption": "x", "mask": "gone.png"})
    assert "gone.png: does not exist" in refused(rows)
    picture(tmp_path / "data" / "a.mask.jpg", None)
    assert "a.mask.png and a.mask.jpg are both masks of a: a sample has one mask" in refused(tmp_path / "data")
    (tmp_path / "data" / "a.mask.jpg").unlink()
    (tmp_path / "data" / "v.mask.png").rename(tmp_path / "data" / "v.mask.mp4")
    assert "v.mask.mp4 must be an image: the mask of a clip holds for all of its frames" in refused(tmp_path / "data")


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
def test_a_folder_with_metadata_of_hugging_face(tmp_path: Path, name: str) -> None:
    for file in ("a.png", "sub/b.png", "unlisted.png"):
        picture(tmp_path / file, None)
    rows: tuple[Any, ...] = (
        {"file_name": "a.png", "width": 8, "text": "a cat", "prompt": "ein Hund", "repeats": 2},
        {"file_name": "sub/b.png", "width": 9, "text": "a dog", "prompt": "eine Katze", "repeats": 1},
    )
    if name.endswith(".csv"):
        rows = ("width,text,file_name,prompt,repeats", "8,a cat,a.png,ein Hund,2", "9,a dog,sub/b.png,eine Katze,1")
    file = table(tmp_path, *rows, name=name)
    for path in (tmp_path, file):
        found = find_sources(path).sources
        assert [(x.id, x.captions, x.repeats, x.origin) for x in found] == [
            ("a.png", ("a cat",), 2, "a.png"),
            ("sub/b.png", ("a dog",), 1, "sub/b.png"),
        ]
    if name.endswith(".jsonl"):  # several captions
        table(tmp_path, {"file_name": "a.png", "text": ["a cat", "a small cat"]}, name="several.jsonl")
        assert find_sources(tmp_path / "several.jsonl").sources[0].captions == ("a cat", "a small cat")
    named = find_sources(tmp_path, caption_column="prompt").sources
    assert [x.captions for x in named] == [("ein Hund",), ("eine Katze",)]
    with pytest.raises(DataError, match=r"line 1: caption_column=title is none of the (keys|columns) .*prompt"):
        find_sources(tmp_path, caption_column="title")


def test_captions_of_another_column_must_be_named(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", None)
    table(tmp_path, {"file_name": "a.png", "prompt": "a cat"}, name="metadata.jsonl")
    assert "name the column of a table (caption_column)" in refused(tmp_path)
    assert find_sources(tmp_path, caption_column="prompt").sources[0].captions == ("a cat",)
    own = table(tmp_path, {"file": "a.png", "caption": "x", "prompt": "a cat"})
    assert "unknown keys 'prompt'; valid: file, caption" in refused(own)
    assert find_sources(own, caption_column="prompt").sources[0].captions == ("a cat",)
    (tmp_path / "metadata.jsonl").unlink()
    with pytest.raises(DataError, match=r"caption_column=prompt is for tables, but .* is a folder without a table"):
        find_sources(tmp_path, caption_column="prompt")
