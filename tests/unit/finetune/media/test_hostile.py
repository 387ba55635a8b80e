"""Files that would block, or that claim more than they hold, are refused before memory is used for them."""

from __future__ import annotations

import os
import resource
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lightning_cp.errors import DataError, MediaError
from lightning_cp.files import read_json, read_regular
from lightning_cp.finetune.adapters.lora_file import read_lora
from lightning_cp.finetune.media import Source, decoder, find_sources, limits, probe, read_clip, read_image, sources
from lightning_cp.finetune.precompute.loading import FileHashes
from tests.unit.finetune.media.encode import grey_frames, write_video


def _special(path: Path, kind: str) -> Path:
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    return path


@pytest.mark.parametrize("kind", ["a named pipe", "a device", "a socket"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    refused = f"{kind}, but must be a regular file"
    data = tmp_path / "data"
    data.mkdir()
    Image.new("RGB", (8, 8)).save(data / "a.png")
    monkeypatch.chdir(data)
    _special(Path("a.txt"), kind)
    with pytest.raises(DataError, match=f"a.txt cannot be read: it is {refused}"):
        find_sources(data)
    for read, name in ((read_image, "b.png"), (probe, "b.mp4")):
        file = data / _special(Path(name), kind)
        with pytest.raises(MediaError, match=f"{name}: cannot be read: it is {refused}"):
            read(file)
        with pytest.raises(MediaError, match=refused):
            FileHashes().of(Source("a", data / "a.png", ("",), reference=file))
    for table in ("rows.csv", "rows.jsonl"):
        with pytest.raises(DataError, match=f"{table} cannot be read: it is {refused}"):
            find_sources(data / _special(Path(table), kind))
    with pytest.raises(ValueError, match=f"b.safetensors.*{refused}"):
        read_lora(data / _special(Path("b.safetensors"), kind))
    with pytest.raises(ValueError, match=f"config.json cannot be read: it is {refused}"):
        read_json(data / _special(Path("config.json"), kind))


def test_text_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    for name, size, limit in (("a.txt", 1 << 21, 1 << 20), ("t.csv", 1 << 40, 1 << 32), ("t.jsonl", 1 << 40, 1 << 32)):
        file = tmp_path / name
        file.touch()
        os.truncate(file, size)  # sparse: it takes no space
        with pytest.raises(DataError, match=f"{name} cannot be read: it has {size} bytes, but .* at most {limit}"):
            find_sources(tmp_path if name == "a.txt" else file)
        file.unlink()
    (tmp_path / "c.json").touch()
    os.truncate(tmp_path / "c.json", 1 << 40)
    with pytest.raises(ValueError, match=f"c.json cannot be read: it has {1 << 40} bytes, but .* at most {1 << 32}"):
        read_json(tmp_path / "c.json")


def test_links_to_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "b").symlink_to("a")
    assert read_regular(tmp_path / "b") == b"x"
    with pytest.raises(IsADirectoryError, match="it is a folder, but must be a file"):
        read_regular(tmp_path)


def test_json_that_is_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json cannot be read: its JSON is nested too deeply"):
        read_json(tmp_path / "config.json")


def test_repeats_have_a_limit(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"file": "a.png", "repeats": {2**62}}}\n')
    with pytest.raises(DataError, match=rf"line 1: repeats={2**62} must be .* to 10000"):
        find_sources(tmp_path / "rows.jsonl")


def test_a_forged_duration_gives_no_clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_video(tmp_path / "a.mp4", grey_frames(9))
    (tmp_path / "a.txt").write_text("a cat")
    real = probe(file)
    assert len(find_sources(tmp_path, clips="all", clip_frames=3).sources) == 3
    forged = type(real)(real.width, real.height, real.fps, 1e9, real.frames)
    monkeypatch.setattr(sources, "probe", lambda _: forged)
    with pytest.raises(
        DataError, match=rf"8000000000 clips .* only {file.stat().st_size} bytes: its header is damaged"
    ):
        find_sources(tmp_path, clips="all", clip_frames=3)


def test_the_frames_of_a_clip_have_a_limit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_video(tmp_path / "a.mp4", grey_frames(9))
    height, width = read_clip(file, frames=9, fps=None).shape[2:]
    monkeypatch.setattr(limits, "CLIP_PIXELS", 8 * height * width)
    assert read_clip(file, frames=8, fps=None).shape[1] == 8
    with pytest.raises(MediaError, match=f"9 frames of {width} x {height} pixels are more than the limit"):
        read_clip(file, frames=9, fps=None)


def test_frames_have_a_limit_before_they_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = [np.zeros((4160, 16384, 3), np.uint8)]
    file = write_video(tmp_path / "a.mp4", large, options={"preset": "ultrafast"})
    del large
    with Path("/proc/self/clear_refs").open("w") as reset:
        reset.write("5")  # the peak of this process's memory
    before = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[1])
    for read in (probe, lambda path: read_clip(path, frames=1, fps=None)):
        with pytest.raises(MediaError, match=r"a\.mp4: has frames of 16384x4160 pixels, but at most 67108864 pixels"):
            read(file)
    peak = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    assert int(peak.split()[1]) * 1024 - before < 60e6  # one frame has 100 MB
    small = write_video(tmp_path / "b.mp4", grey_frames(2))
    monkeypatch.setattr(decoder, "_check_pixels", lambda _: None)
    monkeypatch.setattr(decoder, "_LIMITED", {"max_pixels": "64"})  # also what a header does not say
    with pytest.raises(MediaError, match=r"b\.mp4: "):
        probe(small)


def test_a_large_folder_is_listed_in_linear_time(tmp_path: Path) -> None:
    times = []
    for count in (500, 2000):
        folder = tmp_path / str(count)
        folder.mkdir()
        for i in range(count):
            (folder / f"{i}.png").touch()
            (folder / f"{i}.txt").write_text("a cat")
        started = time.process_time()
        assert len(find_sources(folder).sources) == count
        times.append(time.process_time() - started)
    assert times[1] < 10 * times[0]  # 16 times, if it were quadratic


@pytest.mark.full
def test_deep_folders_and_links_that_multiply(tmp_path: Path) -> None:
    data = deepest = tmp_path / "data"
    data.mkdir()
    for _ in range(1200):
        deepest = deepest / "d"
        os.mkdir(deepest)
    (deepest / "a.png").touch()
    (deepest / "a.txt").write_text("a cat")
    for i in range(30):  # 2^30 ways to the last one
        level = tmp_path / f"level{i}"
        level.mkdir()
        for name in ("x", "y"):
            (level / name).symlink_to(tmp_path / f"level{i + 1}")
    (tmp_path / "level30").mkdir()
    (tmp_path / "level30" / "b.png").touch()
    (tmp_path / "level30" / "b.txt").write_text("a dog")
    (data / "links").symlink_to(tmp_path / "level0")
    (data / "up").symlink_to(data)
    (data / "itself").symlink_to("itself")
    found = find_sources(data)
    while deepest != data:  # pytest cannot remove it
        for file in deepest.iterdir():
            file.unlink() if file.is_file() else file.rmdir()
        deepest = deepest.parent
    assert [source.id for source in found.sources] == ["d/" * 1200 + "a.png", "links/" + "x/" * 30 + "b.png"]
    reasons = [one.reason for one in found.skipped if one.file.name in ("y", "up")]
    assert len(reasons) == 31
    assert all(reason.startswith("a link to a folder that is read already, as ") for reason in reasons)
