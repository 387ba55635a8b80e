"""Samples as files."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_cp.errors import MediaError
from lightning_cp.pipelines.prompts import ClipWithSound
from lightning_cp.recipes.sampling.album import Album
from lightning_cp.recipes.sampling.media import frames_of, write_sample
from lightning_cp.recipes.settings.formats import check_clip_format

PICTURE = torch.linspace(0, 1, 5 * 7 * 3).view(5, 7, 3)
CLIP = torch.stack([PICTURE * weight for weight in (0.2, 0.6, 1.0)])


@pytest.mark.parametrize(
    "sample",
    [
        PICTURE,
        PICTURE.numpy(),
        (PICTURE * 255).round().to(torch.uint8),
        Image.fromarray((PICTURE * 255).round().to(torch.uint8).numpy()),
        [Image.fromarray((PICTURE * 255).round().to(torch.uint8).numpy())],
        PICTURE.unsqueeze(0).bfloat16().float(),
    ],
)
def test_a_picture_is_a_png_of_its_pixels(sample: Any, tmp_path: Path) -> None:
    path = write_sample(sample, tmp_path / "deep" / "one")
    assert path == tmp_path / "deep" / "one.png"
    read = np.asarray(Image.open(path)).astype(int)
    assert np.abs(read - (PICTURE * 255).round().numpy()).max() <= 1


def test_grey_and_transparent_pictures_keep_their_channels(tmp_path: Path) -> None:
    with Image.open(write_sample(PICTURE[..., :1], tmp_path / "grey")) as read:
        assert read.mode == "L"
    with Image.open(write_sample(Image.new("RGBA", (4, 4), (255, 0, 0, 9)), tmp_path / "rgba")) as read:
        assert read.getpixel((0, 0)) == (255, 0, 0, 9)


def test_a_clip_is_a_gif_of_its_frames(tmp_path: Path) -> None:
    path = write_sample(CLIP, tmp_path / "clip", fps=10)
    with Image.open(path) as read:
        assert (path.suffix, read.n_frames, read.info["duration"], read.size) == (".gif", 3, 100, (7, 5))  # type: ignore[attr-defined]


def test_a_clip_can_be_an_mp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_sample(CLIP.repeat(1, 8, 8, 1), tmp_path / "clip", format="mp4", fps=10)
    assert path.suffix == ".mp4"
    assert path.read_bytes()[4:8] == b"ftyp"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MediaError, match=r"format=mp4 needs imageio"):
        write_sample(CLIP, tmp_path / "other", format="mp4")


def test_a_sound_is_a_wav(tmp_path: Path) -> None:
    path = write_sample(np.sin(np.linspace(0, 9, 1000)).reshape(2, 500), tmp_path / "sound", rate_hz=8000)
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getnframes(), file.getframerate()) == (2, 500, 8000)


@pytest.mark.parametrize(
    ("sample", "format", "told"),
    [
        (CLIP, "png", "format=png holds one picture, but a sample has 3 frames"),
        (torch.zeros(2, 5, 7, 9), "auto", r"must be a picture .* got a Tensor of shape \(2, 5, 7, 9\)"),
        ("a cat", "auto", "must be a picture .* got a str"),
        (CLIP, "wav", r"needs a sound \[channels, n\], got a Tensor of shape \(3, 5, 7, 3\)"),
        (Image.new("RGB", (4, 4)), "wav", r"got a Image: use format=auto"),
        ([Image.new("RGB", (4, 4))], "wav", "got a list"),
        (np.zeros(()), "auto", r"must be a picture .* got a ndarray of shape \(\)"),
    ],
)
def test_what_cannot_be_written_is_refused(sample: Any, format: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=told):
        write_sample(sample, tmp_path / "x", format=format)


def test_samples_that_are_no_numbers_are_black(tmp_path: Path) -> None:
    assert not frames_of(torch.full((2, 2, 3), torch.nan)).any()


def test_an_album_has_a_sheet_of_its_samples_in_order(tmp_path: Path) -> None:
    album = Album(tmp_path)
    album.add(1, torch.zeros(8, 8, 3))
    album.add(0, torch.ones(4, 8, 1))
    assert album.draw_sheet(tmp_path / "sheet.png")
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    assert sheet.shape[:2] == (128, 2 * 128 + 6)
    assert sheet[10, 10, 0] == 255
    assert sheet[10, -10, 0] == 0
    sounds = Album(tmp_path)
    sounds.add(0, torch.zeros(1, 9))
    assert not sounds.draw_sheet(tmp_path / "none.png")


def test_a_sample_that_cannot_be_written_is_kept(tmp_path: Path) -> None:
    album = Album(tmp_path, format="png")
    clip = torch.rand(3, 4, 4, 3)
    album.add(0, torch.rand(4, 4, 3))
    album.add(1, clip)
    album.add(2, ClipWithSound(clip, torch.zeros(1, 8), 8000))
    with pytest.raises(MediaError, match=r"sample 1 could not be written \(format=png .*0001\.npz, and so are 1 more"):
        album.draw_sheet(tmp_path / "sheet.png")
    assert (tmp_path / "0000.png").is_file()
    assert (np.load(tmp_path / "0001.npz")["sample"] == clip.numpy()).all()
    assert set(np.load(tmp_path / "0002.npz")) == {"frames", "sound"}


def test_a_format_is_checked_before_sampling() -> None:
    def call(prompt: str, num_frames: int = 81) -> None: ...

    with pytest.raises(MediaError, match=r"format=png holds one picture, .* num_frames=81: use gif"):
        check_clip_format("png", call, {})
    check_clip_format("png", call, {"num_frames": 1})
    check_clip_format("auto", call, {})
    check_clip_format("png", lambda prompt: None, {})
