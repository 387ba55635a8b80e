"""Read images with Pillow."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageCms, ImageOps, UnidentifiedImageError
from torch import Tensor

from lightning_cp.errors import MediaError
from lightning_cp.files import open_regular
from lightning_cp.finetune.media.failures import failures_of

Color = tuple[int, int, int]
WHITE: Color = (255, 255, 255)
BLACK: Color = (0, 0, 0)
# Pillow chooses a format by the content of a file, whatever its name, and some of its readers start other programs
# (EPS: Ghostscript) or have seldom been used. Those of the accepted suffixes, and MPO, the name of some phones' JPEG:
_FORMATS = ("AVIF", "BMP", "DIB", "GIF", "JPEG", "MPO", "PNG", "TIFF", "WEBP")


@contextmanager
def open_image(file: str | Path) -> Iterator[Image.Image]:
    """Open an image of a usual format. Raises: MediaError: it has another one. OSError: it cannot be read."""
    formats = [name for name in _FORMATS if name in _installed()]
    with open_regular(file) as opened:
        try:
            image = Image.open(opened, formats=formats)
        except UnidentifiedImageError:  # its text names the open file by a number
            names = ", ".join(formats)
            raise MediaError(f"{file}: cannot be decoded: it is not an image of one of the formats {names}") from None
        with image:
            yield image


@cache
def _installed() -> frozenset[str]:
    """Return the formats that this Pillow can read (AVIF needs a library)."""
    Image.init()
    return frozenset(Image.OPEN)


def read_image(file: str | Path, *, background: Color = WHITE) -> Tensor:
    """Read an image as sRGB pixels, upright.

    The EXIF orientation is applied. An embedded ICC profile is converted to sRGB; a profile that LittleCMS cannot use
    is ignored, as browsers do. 16-bit images are rounded to 8 bits. Of an animation, the first frame is read.

    Args: background: colour behind transparent pixels, 0 to 255.
    Returns: uint8 [3, h, w].
    Raises: MediaError: the file is missing, damaged, no image, or larger than Pillow's limit against decompression
        bombs; names the file.
    """
    file = Path(file)
    with failures_of(file), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of harmless metadata, and of images above half of the limit for bombs
        with open_image(file) as image:
            image.load()
            upright = ImageOps.exif_transpose(image)
            profile = image.info.get("icc_profile")
            color, alpha = _color_and_alpha(upright)
            rgb = _to_srgb(color, profile)
            if alpha is not None:
                rgb = Image.composite(rgb, Image.new("RGB", rgb.size, background), alpha)
            return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous()


def image_size(file: Path) -> tuple[int, int]:
    """Return height and width of an upright image, from its header. Raises: MediaError, OSError: see `open_image`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in `read_image`
        with open_image(file) as image:
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) > 4
            on_its_side = turned and image.format != "TIFF"  # Pillow turns the size of these already
            return (image.width, image.height) if on_its_side else (image.height, image.width)


def _color_and_alpha(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Split an image of any mode into colour, in a mode of 8 bits, and alpha (mode L); None if it is opaque."""
    if image.mode.startswith("I"):
        return _from_16_bits(image)
    if image.mode == "F":
        raise MediaError("has floating-point pixels, which have no defined white: save it with 8 or 16 bits")
    if image.mode in ("PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("LA" if image.mode == "La" else "RGBA")
    if image.mode in ("RGBA", "LA"):
        return image.convert("RGB" if image.mode == "RGBA" else "L"), image.getchannel("A")
    if image.mode in ("L", "RGB", "CMYK", "LAB"):
        return image, None
    return image.convert("L" if image.mode == "1" else "RGB"), None


def _from_16_bits(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Round 16-bit grey levels to 8 bits. Pillow's `convert` clips or truncates, which depends on its version."""
    levels = np.array(image).astype(np.int64)
    if levels.min() < 0 or levels.max() > 65535:
        raise MediaError(f"has 32-bit pixels from {levels.min()} to {levels.max()}: save it with 8 or 16 bits")
    transparent = image.info.get("transparency")
    alpha = None if transparent is None else Image.fromarray(np.where(levels == transparent, 0, 255).astype(np.uint8))
    return Image.fromarray(((levels * 255 + 32767) // 65535).astype(np.uint8)), alpha


def _to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Convert colours to sRGB. Args: image: mode L, RGB, CMYK or LAB; profile: the embedded ICC profile."""
    source: Any = None
    if profile:
        try:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        except (OSError, ImageCms.PyCMSError):
            source = None
    elif image.mode == "LAB":
        source = ImageCms.createProfile("LAB")
    if source is not None:
        try:
            converted = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
        except (ImageCms.PyCMSError, ValueError):  # such as the profile of a grey scanner in an RGB image
            converted = None
        if converted is not None:
            return converted
    return image.convert("RGB")
