"""Images of every mode are read as upright sRGB pixels; damaged files are refused by name."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, ImageOps

from lightning_cp.errors import MediaError
from lightning_cp.media import read_image

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8)


def read(file: Path, **options: tuple[int, int, int]) -> np.ndarray:
    pixels = read_image(file, **options)
    assert pixels.dtype == torch.uint8
    assert pixels.is_contiguous()
    assert len(pixels) == 3
    return pixels.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.tiff", "a.webp", "Straße 猫.PNG"])
def test_rgb_without_loss_is_unchanged(tmp_path: Path, name: str) -> None:
    Image.fromarray(PIXELS).save(tmp_path / name, **({"lossless": True} if name == "a.webp" else {}))
    assert (read(tmp_path / name) == PIXELS).all()


def test_jpeg_is_near(tmp_path: Path) -> None:
    smooth = np.linspace(0, 255, 32 * 48 * 3).reshape(32, 48, 3).astype(np.uint8)
    Image.fromarray(smooth).save(tmp_path / "a.jpg", quality=98)
    assert np.abs(read(tmp_path / "a.jpg").astype(int) - smooth).mean() < 2


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "webp", "tiff"])
def test_the_exif_orientation_is_applied(tmp_path: Path, orientation: int, suffix: str) -> None:
    stored = Image.fromarray(PIXELS)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / f"a.{suffix}", exif=exif, **({"lossless": True} if suffix == "webp" else {}))
    turns = {1: 0, 2: 0, 3: 2, 4: 2, 5: 1, 6: 3, 7: 3, 8: 1}  # counter-clockwise, before mirroring
    shown = np.rot90(PIXELS, turns[orientation])
    if orientation in (2, 4):
        shown = shown[:, ::-1]
    if orientation in (5, 7):
        shown = shown[::-1]
    assert (read(tmp_path / f"a.{suffix}") == shown).all()


def test_alpha_is_composited_on_the_background(tmp_path: Path) -> None:
    alpha = np.array([[0, 51, 128, 255, 255, 0, 51]] * 5, np.uint8)
    Image.fromarray(np.dstack([PIXELS, alpha])).save(tmp_path / "a.png")
    opacity = alpha[..., None] / 255
    assert np.abs(read(tmp_path / "a.png") - (PIXELS * opacity + 255 * (1 - opacity))).max() <= 1
    on_colour = PIXELS * opacity + np.array((10, 20, 30)) * (1 - opacity)
    assert np.abs(read(tmp_path / "a.png", background=(10, 20, 30)) - on_colour).max() <= 1
    grey = PIXELS[..., 0]
    Image.merge("LA", [Image.fromarray(grey), Image.fromarray(alpha)]).save(tmp_path / "b.png")
    expected = (grey * opacity[..., 0] + 255 * (1 - opacity[..., 0]))[..., None]
    assert np.abs(read(tmp_path / "b.png") - expected).max() <= 1


def test_palettes_and_their_transparency(tmp_path: Path) -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.putdata([0, 1, 2])
    image.save(tmp_path / "opaque.png")
    assert read(tmp_path / "opaque.png").tolist() == [[[255, 0, 0], [0, 255, 0], [0, 0, 255]]]
    image.save(tmp_path / "index.png", transparency=1)
    assert read(tmp_path / "index.png").tolist() == [[[255, 0, 0], [255, 255, 255], [0, 0, 255]]]
    image.save(tmp_path / "bytes.png", transparency=bytes([255, 0, 51]))
    assert read(tmp_path / "bytes.png").tolist() == [[[255, 0, 0], [255, 255, 255], [204, 204, 255]]]
    Image.fromarray(np.array([[[1, 2, 3], [9, 9, 9]]], np.uint8)).save(tmp_path / "key.png", transparency=(1, 2, 3))
    assert read(tmp_path / "key.png").tolist() == [[[255, 255, 255], [9, 9, 9]]]


def test_one_bit_and_grey(tmp_path: Path) -> None:
    Image.fromarray(np.array([[True, False]])).save(tmp_path / "bit.png")
    assert read(tmp_path / "bit.png").tolist() == [[[255] * 3, [0] * 3]]
    Image.fromarray(PIXELS[..., 1]).save(tmp_path / "grey.png")
    assert (read(tmp_path / "grey.png") == PIXELS[..., 1:2]).all()


def _png(samples: np.ndarray, color_type: int, *, extra: bytes = b"") -> bytes:
    """Encode 16-bit samples [h, w, channels]; Pillow writes no RGB of 16 bits."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = samples.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, 16, color_type, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
    parts = [chunk(b"IHDR", header), extra, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_16_bits_are_scaled_to_8(tmp_path: Path) -> None:
    levels = np.array([[0, 128, 129, 257, 32768, 65407, 65535]], np.uint16)
    rounded = np.round(levels / 257)[..., None]
    Image.fromarray(levels).save(tmp_path / "grey.png")
    assert (read(tmp_path / "grey.png") == rounded).all()
    Image.fromarray(levels).save(tmp_path / "grey.tiff")
    assert (read(tmp_path / "grey.tiff") == rounded).all()
    Image.fromarray(levels.astype(np.int32)).save(tmp_path / "int.tiff")
    assert (read(tmp_path / "int.tiff") == rounded).all()
    Image.fromarray(levels.astype(np.int32) * 9).save(tmp_path / "large.tiff")
    with pytest.raises(MediaError, match=r"large\.tiff: has 32-bit pixels from 0 to 589815"):
        read_image(tmp_path / "large.tiff")
    rgb = RNG.integers(0, 65536, (4, 6, 3)).astype(np.uint16)
    (tmp_path / "rgb.png").write_bytes(_png(rgb, 2))
    assert np.abs(read(tmp_path / "rgb.png") - rgb / 257).max() <= 1  # Pillow keeps the high byte
    key = struct.pack(">I", 2) + b"tRNS" + struct.pack(">H", 32768)
    key += struct.pack(">I", zlib.crc32(key[4:]))
    (tmp_path / "key.png").write_bytes(_png(levels[..., None], 0, extra=key))
    assert read(tmp_path / "key.png")[0, :, 0].tolist() == [0, 0, 1, 1, 255, 255, 255]


def test_floating_point_pixels_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.ones((2, 2), np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(MediaError, match=r"a\.tiff: has floating-point pixels"):
        read_image(tmp_path / "a.tiff")


def test_cmyk(tmp_path: Path) -> None:
    inks = Image.new("CMYK", (8, 8), (255, 0, 0, 0))
    inks.save(tmp_path / "a.tiff")
    assert np.abs(read(tmp_path / "a.tiff")[4, 4].astype(int) - (0, 255, 255)).max() <= 1
    inks.save(tmp_path / "a.jpg", quality=95)  # Adobe's inverted inks
    assert np.abs(read(tmp_path / "a.jpg")[4, 4].astype(int) - (0, 255, 255)).max() <= 6


@pytest.mark.parametrize("suffix", ["gif", "webp"])
def test_the_first_frame_of_an_animation_is_read(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (4, 3), color) for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if suffix == "webp" else {}
    frames[0].save(tmp_path / f"a.{suffix}", save_all=True, append_images=frames[1:], **options)
    assert (read(tmp_path / f"a.{suffix}") == (255, 0, 0)).all()


def test_an_icc_profile_is_converted_to_srgb(tmp_path: Path) -> None:
    image = Image.fromarray(PIXELS)
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    image.save(tmp_path / "srgb.png", icc_profile=srgb)
    assert np.abs(read(tmp_path / "srgb.png").astype(int) - PIXELS).max() <= 1
    reddish = np.array([[[200, 100, 100], [120, 130, 120]]], np.uint8)
    lab = ImageCms.profileToProfile(
        Image.fromarray(reddish), ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB"
    )
    lab.save(tmp_path / "lab.tiff")
    assert np.abs(read(tmp_path / "lab.tiff").astype(int) - reddish).max() <= 4


def _swapped_profile() -> bytes:
    """An sRGB profile with the primaries of red and blue exchanged."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    count = struct.unpack(">I", profile[128:132])[0]
    tags = {bytes(profile[132 + 12 * i : 136 + 12 * i]): 132 + 12 * i for i in range(count)}
    red, blue = tags[b"rXYZ"], tags[b"bXYZ"]
    profile[red : red + 4], profile[blue : blue + 4] = b"bXYZ", b"rXYZ"
    return bytes(profile)


def test_an_icc_profile_changes_colours(tmp_path: Path) -> None:
    swapped = _swapped_profile()
    Image.fromarray(PIXELS).save(tmp_path / "rgb.png", icc_profile=swapped)
    assert np.abs(read(tmp_path / "rgb.png").astype(int) - PIXELS[..., ::-1]).max() <= 2
    opaque = np.full((*PIXELS.shape[:2], 1), 255, np.uint8)
    Image.fromarray(np.dstack([PIXELS, opaque])).save(tmp_path / "rgba.png", icc_profile=swapped)
    assert np.abs(read(tmp_path / "rgba.png").astype(int) - PIXELS[..., ::-1]).max() <= 2


@pytest.mark.parametrize("profile", [b"no profile", b"\0" * 200])
def test_a_profile_that_cannot_be_used_is_ignored(tmp_path: Path, profile: bytes) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "a.png", icc_profile=profile)
    assert (read(tmp_path / "a.png") == PIXELS).all()
    Image.fromarray(PIXELS[..., 0]).save(tmp_path / "b.png", icc_profile=_swapped_profile())  # of RGB, in a grey image
    assert (read(tmp_path / "b.png") == PIXELS[..., :1]).all()


def test_damaged_and_other_files_are_refused_by_name(tmp_path: Path) -> None:
    noise = Image.fromarray(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    for suffix in ("png", "jpg", "webp", "tiff", "gif", "bmp"):
        file = tmp_path / f"whole.{suffix}"
        noise.save(file)
        (tmp_path / f"truncated.{suffix}").write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        if suffix == "png":
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 255
            (tmp_path / "flipped.png").write_bytes(data)
            data[16:24] = struct.pack(">II", 2**31 - 1, 2**31 - 1)
            data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
            (tmp_path / "huge.png").write_bytes(data)
    (tmp_path / "text.jpg").write_text("a cat")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "folder.png").mkdir()
    reasons = {
        "huge.png": "decompression bomb",
        "folder.png": "this is a folder",
        "missing.png": "the file does not exist",
        "text.jpg": "cannot be decoded: it is not an image of one of the formats AVIF, BMP",
    }
    refused = [
        *(f"truncated.{suffix}" for suffix in ("png", "jpg", "webp", "tiff", "gif", "bmp")),
        "flipped.png",
        "empty.png",
    ]
    for name in [*refused, *reasons]:
        with pytest.raises(MediaError) as error:
            read_image(tmp_path / name)
        assert str(error.value).startswith(f"{tmp_path / name}: ")
        assert reasons.get(name, "cannot be decoded") in str(error.value)
        assert "\n" not in str(error.value)


def test_a_large_image_is_no_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "a.png")
    monkeypatch.setattr(
        Image, "MAX_IMAGE_PIXELS", 20
    )  # 35 pixels: Pillow warns above its limit, and raises at twice it
    assert (read(tmp_path / "a.png") == PIXELS).all()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(MediaError, match="decompression bomb"):
        read_image(tmp_path / "a.png")


def test_memory_errors_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "a.png")

    def fail(image: Image.Image) -> None:
        raise MemoryError

    monkeypatch.setattr(ImageOps, "exif_transpose", fail)
    with pytest.raises(MemoryError):
        read_image(tmp_path / "a.png")


@pytest.mark.parametrize("name", ["eps", "PPM", "ICO", "PCX"])
def test_a_format_that_no_suffix_names_is_refused_whatever_the_name(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.png"
    Image.new("RGB", (8, 8), "red").save(file, format=name)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("started a program"))
    monkeypatch.setattr("subprocess.check_call", lambda *_, **__: pytest.fail("started a program"))
    with pytest.raises(MediaError, match=r"a\.png: cannot be decoded: it is not an image of one of the formats"):
        read_image(file)
