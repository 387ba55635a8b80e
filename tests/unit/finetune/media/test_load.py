"""One call loads a source; every failure is a MediaError that names the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_cp.errors import MediaError
from lightning_cp.finetune.media import Bucket, Source, find_sources, load, load_media
from tests.unit.finetune.media.encode import STEP, grey_frames, numbers, write_video

BUCKETS = [Bucket(frames, *size) for frames in (1, 5, 9) for size in ((32, 48), (48, 32))]


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 frames of 48 x 64 pixels at 24 frames per second."""
    return write_video(tmp_path_factory.mktemp("video") / "a.mp4", grey_frames(12))


def frame_numbers(pixels: torch.Tensor) -> list[int]:
    return numbers(((pixels + 1) * 127.5).round().byte())


def test_an_image_with_a_reference(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = {name: rng.integers(0, 256, (32, 52, 3), dtype=np.uint8) for name in ("a", "b")}
    for name, values in pixels.items():
        Image.fromarray(values).save(tmp_path / f"{name}.png")
    loaded = load_media(Source("a", tmp_path / "a.png", ("x",), reference=tmp_path / "b.png"), BUCKETS)
    assert loaded.bucket == Bucket(1, 32, 48)
    assert loaded.fps is None
    assert loaded.crop.left == 2
    for tensor, name in ((loaded.pixels, "a"), (loaded.reference, "b")):
        assert tensor is not None
        expected = pixels[name][:, 2:50].astype(np.float32) / np.float32(127.5) - 1
        assert (tensor[:, 0].permute(1, 2, 0).numpy() == expected).all()


def test_a_clip(video: Path) -> None:
    loaded = load_media(Source("a", video, ("x",)), BUCKETS)
    assert loaded.bucket == Bucket(9, 32, 48)
    assert loaded.pixels.shape == (3, 9, 32, 48)
    assert loaded.fps == pytest.approx(24)
    assert loaded.reference is None
    assert frame_numbers(loaded.pixels) == list(range(9))
    slow = load_media(Source("a", video, ("x",)), BUCKETS, fps=12)
    assert (slow.bucket.frames, slow.fps) == (5, 12)
    assert frame_numbers(slow.pixels) == [0, 2, 4, 6, 8]
    ranged = load_media(Source("a", video, ("x",), start_s=3 / 24, end_s=9 / 24), BUCKETS)
    assert frame_numbers(ranged.pixels) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("name", ["a.mkv", "a.mp4", "a.avi"])
@pytest.mark.parametrize("fps", [None, 16.0])
def test_all_clips_of_a_video_together_are_the_video(tmp_path: Path, name: str, fps: float | None) -> None:
    write_video(tmp_path / name, grey_frames(30))
    sources = find_sources(tmp_path, captions="optional", clips="all", clip_frames=5, fps=fps).sources
    clips = [frame_numbers(load_media(source, [Bucket(5, 48, 64)], fps=fps).pixels) for source in sources]
    assert len(clips) == (6 if fps is None else 4)
    expected = range(30) if fps is None else [3 * i // 2 for i in range(20)]
    assert [number for clip in clips for number in clip] == list(expected)


def test_a_video_shorter_than_it_says_gets_a_shorter_bucket(video: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "resampled_frames", lambda info, **options: 99)
    source = Source("a", video, ("x",))
    assert load_media(source, [Bucket(5, 32, 48), Bucket(13, 32, 48)]).bucket.frames == 5
    with pytest.raises(MediaError, match=r"a\.mp4: has 12 frames from 0 s at 24 frames per second, but 13 are needed"):
        load_media(source, [Bucket(13, 32, 48)])


def test_every_failure_names_the_file(tmp_path: Path, video: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (48, 32)).save(tmp_path / "good.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "small.png")
    (tmp_path / "text.jpg").write_text("a cat")
    (tmp_path / "bad.mp4").write_bytes(video.read_bytes()[:99])
    good, small, text = (tmp_path / name for name in ("good.png", "small.png", "text.jpg"))
    one = [Bucket(1, 32, 48)]
    cases: list[tuple[Source, list[Bucket], str]] = [
        (Source("", small, ("x",)), one, f"{small}: is too small: 8x8 pixels must be enlarged 6.00 times"),
        (Source("", text, ("x",)), one, f"{text}: cannot be decoded: it is not an image of one of the formats"),
        (Source("", tmp_path / "bad.mp4", ("x",)), one, f"{tmp_path / 'bad.mp4'}: cannot be decoded"),
        (Source("", good, ("x",), reference=text), one, f"{good}: {text}: cannot be decoded"),
        (Source("", good, ("x",)), [Bucket(5, 32, 48)], f"{good}: has 1 frame, but the shortest bucket has 5"),
        (Source("", video, ("x",)), [Bucket(1, 320, 480)], f"{video}: is too small: 64x48"),
        (Source("", video, ("x",), start_s=9.0), one, f"{video}: has 0 frames"),
        (Source("", good, ("x",)), [], f"{good}: "),
    ]
    for source, buckets, expected in cases:
        with pytest.raises(MediaError) as error:
            load_media(source, buckets)
        assert str(error.value).startswith(expected)

    def fail(*args: Any, **options: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(load, "fit", fail)
    with pytest.raises(MemoryError):
        load_media(Source("", good, ("x",)), one)


def test_a_large_video_is_refused_before_it_is_decoded(video: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "read_clip", lambda *args, **options: pytest.fail("decoded"))
    with pytest.raises(MediaError, match="is too small"):
        load_media(Source("", video, ("x",)), [Bucket(9, 320, 480)])
    assert STEP * 12 < 256


def test_a_control_clip_shows_the_frames_of_its_clip(tmp_path: Path, video: Path) -> None:
    control = write_video(tmp_path / "control.mp4", grey_frames(12))
    source = Source("a", video, ("x",), reference=control, start_s=3 / 24, end_s=9 / 24)
    for fps, expected in ((None, [3, 4, 5, 6, 7]), (12, [3])):
        loaded = load_media(source, BUCKETS, fps=fps)
        assert loaded.reference is not None
        assert loaded.reference.shape == loaded.pixels.shape
        assert frame_numbers(loaded.reference) == frame_numbers(loaded.pixels) == expected


def test_a_control_clip_with_another_rate_or_too_few_frames(tmp_path: Path, video: Path) -> None:
    control = write_video(tmp_path / "slow.mp4", grey_frames(12), rate=12)
    source = Source("a", video, ("x",), reference=control)
    message = r"slow\.mp4: has 12 frames per second, but a\.mp4 has 24: set one rate for both, such as precompute\.fps="
    with pytest.raises(MediaError, match=message):
        load_media(source, BUCKETS)
    loaded = load_media(source, BUCKETS, fps=12)
    assert loaded.reference is not None
    assert frame_numbers(loaded.reference) == [0, 1, 2, 3, 4]
    short = write_video(tmp_path / "short.mp4", grey_frames(4))
    with pytest.raises(MediaError, match=r"short\.mp4: has 4 frames .*, but 9 are needed"):
        load_media(Source("a", video, ("x",), reference=short), BUCKETS)
