"""Clips have the right frames: times, order, colours, orientation; damaged files are refused by name."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from lightning_cp.errors import MediaError
from lightning_cp.finetune.media import decoder, probe, read_clip
from lightning_cp.finetune.media.videos import ShortClipError
from tests.unit.finetune.media.encode import grey_frames, numbers, write_video

B_FRAMES = {"bf": "3", "g": "12", "x264-params": "b-adapt=0:scenecut=0"}


@pytest.fixture(scope="module")
def long_video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 frames at 24 frames per second, with B-frames."""
    return write_video(tmp_path_factory.mktemp("long") / "long.mp4", grey_frames(60), options=B_FRAMES)


@pytest.mark.parametrize(
    ("name", "codec", "options"),
    [
        ("a.mp4", "libx264", B_FRAMES),
        ("a.mkv", "libx264", {**B_FRAMES, "x264-params": "open-gop=1:b-adapt=0:scenecut=0"}),
        ("a.ts", "libx264", B_FRAMES),
        ("a.flv", "libx264", B_FRAMES),
        ("a.avi", "libx264", B_FRAMES),
        ("b.avi", "mpeg4", {"bf": "2", "g": "12", "qmin": "1", "qmax": "1"}),
        ("a.mpg", "mpeg2video", {"bf": "2", "g": "12", "qmin": "1", "qmax": "1"}),
        ("a.mov", "mpeg4", {"g": "12", "qmin": "1", "qmax": "1"}),
        ("a.webm", "libvpx-vp9", {"g": "12", "cpu-used": "8", "deadline": "realtime"}),
    ],
)
@pytest.mark.default("a.webm")
def test_frames_come_in_order_from_any_start(tmp_path: Path, name: str, codec: str, options: dict[str, str]) -> None:
    file = write_video(tmp_path / name, grey_frames(60), codec=codec, options=options)
    info = probe(file)
    assert (info.width, info.height) == (64, 48)
    assert info.fps == pytest.approx(24, rel=1e-3)
    assert info.duration_s == pytest.approx(2.5, abs=0.09)  # FLV counts the delay of B-frames
    assert info.frames in (None, 60)
    assert numbers(read_clip(file, frames=60, fps=None)) == list(range(60))
    for start in (1, 12, 13, 24, 55):
        for fps in (None, 24.0):
            assert numbers(read_clip(file, frames=5, fps=fps, start_s=start / 24)) == list(range(start, start + 5))
    with pytest.raises(ShortClipError, match="60 frames") as error:
        read_clip(file, frames=61, fps=None)
    assert error.value.available == 60


def test_a_clip_does_not_decode_the_video_before_it(long_video: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []

    class Counted(decoder.Frame):
        def __post_init__(self) -> None:
            decoded.append(self.time_s)

    monkeypatch.setattr(decoder, "Frame", Counted)
    read_clip(long_video, frames=2, fps=24, start_s=50 / 24)
    assert len(set(decoded)) <= 1 + 12 + 5  # the first frame, one group of pictures, and what the clip needs


@pytest.mark.parametrize(("fps", "count"), [(24, 60), (12, 30), (16, 40), (30, 75), (10, 25), (23.976, 60), (60, 150)])
@pytest.mark.default(3)
def test_resampling_takes_the_nearest_frame(long_video: Path, fps: float, count: int) -> None:
    times = np.arange(60) / 24
    # argmin takes the first of two equal distances; the rounding makes ties equal
    expected = [int(np.argmin(np.round(np.abs(times - i / fps), 6))) for i in range(count)]
    assert numbers(read_clip(long_video, frames=count, fps=fps)) == expected
    with pytest.raises(ShortClipError, match=f"has {count} frames from 0 s at {fps:g} frames per second"):
        read_clip(long_video, frames=count + 1, fps=fps)


def test_resampling_is_regular_where_a_container_rounds_times(tmp_path: Path) -> None:
    file = write_video(tmp_path / "a.mkv", grey_frames(60))
    assert numbers(read_clip(file, frames=12, fps=16)) == [0, 1, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16]


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_a_variable_rate_keeps_its_speed(tmp_path: Path, name: str) -> None:
    times = [0, 40, 80, 300, 310, 320, 330, 500, 900, 940, 980]
    file = write_video(tmp_path / name, grey_frames(11), times_ms=times)
    assert numbers(read_clip(file, frames=10, fps=10)) == [
        int(np.argmin(np.abs(np.array(times) - 100 * i))) for i in range(10)
    ]
    assert numbers(read_clip(file, frames=3, fps=10, start_s=0.3)) == [3, 6, 7]
    assert numbers(read_clip(file, frames=11, fps=None)) == list(range(11))


def test_the_end_of_a_range_is_not_crossed(long_video: Path) -> None:
    assert numbers(read_clip(long_video, frames=5, fps=None, start_s=10 / 24, end_s=15 / 24)) == [10, 11, 12, 13, 14]
    with pytest.raises(ShortClipError, match=r"has 5 frames from 0\.416667 s to 0\.625 s"):
        read_clip(long_video, frames=6, fps=None, start_s=10 / 24, end_s=15 / 24)
    # the last time, 0.6083 s, is nearest to frame 15, which begins at the end
    assert numbers(read_clip(long_video, frames=12, fps=60, start_s=10 / 24, end_s=15 / 24))[-1] == 14


def test_the_last_frame_is_shown_until_the_end(long_video: Path, tmp_path: Path) -> None:
    span = {"start_s": 58 / 24, "end_s": 59.5 / 24}  # the video ends later, with the same frame
    assert numbers(read_clip(long_video, frames=15, fps=240, **span)) == [58] * 6 + [59] * 9
    with pytest.raises(ShortClipError, match="has 15 frames"):
        read_clip(long_video, frames=16, fps=240, **span)
    file = write_video(tmp_path / "a.mkv", grey_frames(3), times_ms=[0, 330, 500])  # does not store how long
    assert numbers(read_clip(file, frames=16, fps=100, start_s=0.34, end_s=0.5)) == [1] * 16


@pytest.mark.parametrize("start_s", [2.5, 99.0])
def test_a_start_behind_the_end_is_a_short_clip(long_video: Path, start_s: float) -> None:
    for fps in (None, 24):
        with pytest.raises(ShortClipError, match="has 0 frames"):
            read_clip(long_video, frames=1, fps=fps, start_s=start_s)


def _chart(height: int, width: int) -> np.ndarray:
    colors = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (128, 128, 128), (255, 255, 0)]
    colors += [(0, 200, 200), (30, 90, 160)]
    chart = np.zeros((height, width, 3), np.uint8)
    for k, color in enumerate(colors):
        rows, columns = (slice(i * n // 3, (i + 1) * n // 3) for i, n in ((k // 3, height), (k % 3, width)))
        chart[rows, columns] = color
    return chart


def _write_chart(
    file: Path, chart: np.ndarray, *, matrix: tuple[float, float], full: bool, tags: tuple[int, int]
) -> None:
    """Encode a chart without loss, converted to YUV here. Args: matrix: K_R and K_B; tags: AVColorSpace and range."""
    k_r, k_b = matrix
    red, green, blue = (chart[..., i] / 255 for i in range(3))
    luma = k_r * red + (1 - k_r - k_b) * green + k_b * blue
    chroma = [(blue - luma) / (2 - 2 * k_b), (red - luma) / (2 - 2 * k_r)]
    planes = [luma * 255 if full else luma * 219 + 16, *(x * (255 if full else 224) + 128 for x in chroma)]
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=24, options={"qp": "0"})
        stream.height, stream.width, _ = chart.shape
        stream.pix_fmt = "yuv444p"
        stream.codec_context.colorspace, stream.codec_context.color_range = tags
        frame = av.VideoFrame(stream.width, stream.height, "yuv444p")
        frame.colorspace, frame.color_range = tags
        for plane, values in zip(frame.planes, planes, strict=True):
            padded = np.zeros((stream.height, plane.line_size), np.uint8)
            padded[:, : stream.width] = values.round().clip(0, 255)
            plane.update(padded.tobytes())
        frame.pts = 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


MATRICES = {"bt709": (0.2126, 0.0722), "bt601": (0.299, 0.114), "bt2020": (0.2627, 0.0593)}


@pytest.mark.parametrize(
    ("matrix", "colorspace", "full", "size"),
    [
        ("bt709", 1, False, (90, 90)),
        ("bt709", 1, True, (90, 90)),
        ("bt601", 6, False, (90, 90)),
        ("bt601", 5, True, (90, 90)),
        ("bt2020", 9, False, (90, 90)),
        ("bt601", 2, False, (480, 640)),  # unspecified: by the size
        ("bt709", 2, False, (720, 960)),
    ],
)
def test_colours_are_those_of_a_chart(
    tmp_path: Path, matrix: str, colorspace: int, full: bool, size: tuple[int, int]
) -> None:
    chart = _chart(*size)
    tags = (colorspace, 2 if full else 0 if colorspace == 2 else 1)
    _write_chart(tmp_path / "chart.mkv", chart, matrix=MATRICES[matrix], full=full, tags=tags)
    clip = read_clip(tmp_path / "chart.mkv", frames=1, fps=None)
    error = (clip[:, 0].permute(1, 2, 0).int() - torch.from_numpy(chart).int()).abs()
    assert int(error.max()) <= 2  # YUV of 8 bits is coarser than RGB


def test_hdr_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "hdr.mp4"
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p10le"
        stream.codec_context.color_trc = 16
        frame = av.VideoFrame.from_ndarray(grey_frames(1)[0], "rgb24").reformat(format="yuv420p10le")
        frame.pts, frame.color_trc = 0, 16
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(MediaError, match=r"hdr\.mp4: is HDR \(PQ\): convert it to SDR"):
        read_clip(file, frames=1, fps=None)


def _corners(height: int, width: int) -> np.ndarray:
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2, 0] = 255
    pixels[: height // 2, width // 2 :, 1] = 255
    pixels[height // 2 :, : width // 2, 2] = 255
    return pixels


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
@pytest.mark.parametrize("mirrored", [False, True])
def test_rotated_and_mirrored_videos_are_upright(tmp_path: Path, degrees: int, mirrored: bool) -> None:
    stored = _corners(48, 80)
    rotation = {"degrees": degrees, "hflip": mirrored}
    file = write_video(tmp_path / "a.mp4", [stored] * 2, rotation=rotation, pixel_format="yuv444p")
    shown = np.rot90(stored, degrees // 90)  # counter-clockwise, as PyAV's `rotation`
    shown = shown[:, ::-1] if mirrored else shown
    clip = read_clip(file, frames=2, fps=None)
    assert clip.shape == (3, 2, *shown.shape[:2])
    error = (clip[:, 1].permute(1, 2, 0).int() - torch.from_numpy(shown.copy()).int()).abs().float()
    assert error.mean() < 6
    info = probe(file)
    assert (info.height, info.width) == shown.shape[:2]


def test_pixels_that_are_not_square_are_made_square(tmp_path: Path) -> None:
    file = write_video(tmp_path / "a.mp4", [_corners(48, 64)], pixel_aspect=Fraction(16, 11))
    clip = read_clip(file, frames=1, fps=None)
    assert clip.shape == (3, 1, 48, 93)
    assert (probe(file).width, probe(file).height) == (93, 48)
    assert clip[0, 0, 10, 40] > 200
    assert clip[1, 0, 10, 52] > 200


def test_odd_sizes(tmp_path: Path) -> None:
    frames = grey_frames(5, height=33, width=51)
    file = write_video(tmp_path / "a.mkv", frames, codec="ffv1", pixel_format="yuv420p")
    clip = read_clip(file, frames=5, fps=None)
    assert clip.shape == (3, 5, 33, 51)
    assert (clip.amax(dim=(0, 2, 3)) - clip.amin(dim=(0, 2, 3)) <= 2).all()
    assert numbers(clip) == [0, 1, 2, 3, 4]


def test_rgb_without_loss_is_unchanged_and_alpha_is_on_white(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    file = write_video(tmp_path / "a.mkv", [pixels], codec="ffv1", pixel_format="bgr0")
    assert (read_clip(file, frames=1, fps=None)[:, 0].permute(1, 2, 0).numpy() == pixels).all()
    with av.open(str(tmp_path / "b.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=24)
        stream.width, stream.height, stream.pix_fmt = 40, 30, "bgra"
        frame = av.VideoFrame.from_ndarray(np.dstack([pixels, np.full((30, 40), 51, np.uint8)]), "rgba")
        container.mux(stream.encode(frame.reformat(format="bgra")))
        container.mux(stream.encode())
    blended = read_clip(tmp_path / "b.mkv", frames=1, fps=None)[:, 0].permute(1, 2, 0).numpy()
    assert np.abs(blended - (0.2 * pixels + 0.8 * 255)).max() <= 0.51


def test_damaged_and_other_files_are_refused_by_name(tmp_path: Path, long_video: Path) -> None:
    data = long_video.read_bytes()
    (tmp_path / "truncated.mp4").write_bytes(data[: len(data) // 2])  # its index was at the end
    (tmp_path / "text.mp4").write_text("a cat\n" * 50)
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "noise.webm").write_bytes(np.random.default_rng(0).bytes(5000))
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "playlist.mp4").write_text(f"ffconcat version 1.0\nfile '{long_video}'\n")
    segment = f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{long_video}\n#EXT-X-ENDLIST\n"
    (tmp_path / "hls.mp4").write_text(segment)
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    reasons = {"sound.mp4": "has no video stream, only audio", "folder.mp4": "this is a folder", "no.mp4": "not exist"}
    names = [
        "truncated.mp4",
        "text.mp4",
        "empty.mp4",
        "noise.webm",
        "folder.mp4",
        "playlist.mp4",
        "hls.mp4",
        "sound.mp4",
        "no.mp4",
    ]
    for name in names:
        for read in (probe, lambda file: read_clip(file, frames=1, fps=None)):
            with pytest.raises(MediaError) as error:
                read(tmp_path / name)
            assert str(error.value).startswith(f"{tmp_path / name}: ")
            assert reasons.get(name, "cannot be decoded") in str(error.value)


def test_a_file_of_another_format_is_refused_whatever_its_name(tmp_path: Path, long_video: Path) -> None:
    file = tmp_path / "picture.mp4"  # image2: a format that PyAV opens by content, and that names files by numbers
    Image.new("RGB", (8, 8), "red").save(file, format="PNG")
    with pytest.raises(MediaError, match=r"cannot be decoded"):
        probe(file)
    assert probe(long_video)


def test_damage_that_the_decoder_notices_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frames = [rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for _ in range(30)]
    file = write_video(tmp_path / "a.mp4", frames, codec="mpeg4", options={"g": "10"})
    data = bytearray(file.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 200] = rng.bytes(200)
    file.write_bytes(data)
    with pytest.raises(MediaError, match=r"a\.mp4: (the frame at [\d.]+ s is damaged|cannot be decoded)"):
        read_clip(file, frames=30, fps=None)


def test_a_video_that_ends_early_says_how_many_frames_it_has(tmp_path: Path) -> None:
    file = write_video(tmp_path / "a.mkv", grey_frames(60), options={"g": "6"})
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ShortClipError, match=r"a\.mkv: has \d+ frames from 0 s at 24 frames per second") as error:
        read_clip(file, frames=60, fps=None)
    assert 0 < error.value.available < 60


@pytest.mark.parametrize("name", ["Übung über 猫 \U0001f408.mp4", "http:a.mp4", "a%03d.mp4", "a#1 'b'.mp4"])
def test_names_that_are_no_addresses(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(tmp_path / "x.mp4", grey_frames(3)).rename(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert numbers(read_clip(name, frames=3, fps=None)) == [0, 1, 2]


def test_without_pyav_the_error_says_how_to_install_it(long_video: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MediaError, match=r"long\.mp4: reading videos needs the package av.*pip install 'av"):
        probe(long_video)


@pytest.mark.parametrize(
    "wrong",
    [{"frames": 0}, {"fps": 0.0}, {"fps": float("nan")}, {"start_s": -1.0}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_arguments_are_refused(long_video: Path, wrong: dict[str, float]) -> None:
    with pytest.raises(MediaError, match="must be positive"):
        read_clip(long_video, **{"frames": 1, "fps": None, **wrong})  # type: ignore[arg-type]
