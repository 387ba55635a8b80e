"""Crop and resize media to the size of a bucket."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp.errors import MediaError
from lightning_cp.finetune.media.buckets import MAX_UPSCALE, Bucket


@dataclass(frozen=True)
class Crop:
    """The part of each frame that was kept.

    Args:
        top: first row, in pixels of the image or video.
        left: first column.
        height: number of rows.
        width: number of columns.
        scale: factor by which the part was resized: above 1, it was enlarged.
    """

    top: int
    left: int
    height: int
    width: int
    scale: float


def fit(pixels: Tensor, bucket: Bucket, *, max_upscale: float = MAX_UPSCALE) -> tuple[Tensor, Crop]:
    """Cut the largest centred part with the bucket's aspect ratio, and resize it to the bucket's size.

    Resizing is bicubic and antialiased, in float32: its filter is that of Pillow's BICUBIC, which grows with the
    reduction, but without rounding to 8 bits between and after the two passes. Lanczos is a little sharper and rings
    more; torch does not have it.

    Args:
        pixels: uint8 [3, f, h, w], f at least `bucket.frames`; the first ones are used.
        max_upscale: largest factor of enlargement.
    Returns: float32 [3, bucket.frames, bucket.height, bucket.width] in [-1, 1], contiguous: x / 127.5 - 1 if the size
        does not change.
    Raises: MediaError: too few frames, or too small for the bucket.
    """
    crop = centre_crop(pixels.shape[-2], pixels.shape[-1], bucket, max_upscale=max_upscale)
    if pixels.shape[1] < bucket.frames:
        raise MediaError(f"has {pixels.shape[1]} frames, but the bucket has {bucket.frames}")
    kept = pixels[..., crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    out = torch.empty(3, bucket.frames, bucket.height, bucket.width)
    for i in range(bucket.frames):  # one frame at a time: a clip in float32 at its full size may not fit in memory
        out[:, i] = _resized(kept[:, i], bucket.height, bucket.width)
    return out.div_(127.5).sub_(1), crop


def centre_crop(height: int, width: int, bucket: Bucket, *, max_upscale: float = MAX_UPSCALE) -> Crop:
    """Return the largest centred part of a frame that has the bucket's aspect ratio, to the nearest pixel.

    Raises: MediaError: it must be enlarged more than `max_upscale` times.
    """
    scale = max(bucket.height / height, bucket.width / width)
    if scale > max_upscale:
        raise MediaError(
            f"is too small: {width}x{height} pixels must be enlarged {scale:.2f} times for "
            f"{bucket.width}x{bucket.height}, but max_upscale={max_upscale:g}. Use a smaller size, or raise max_upscale"
        )
    kept_h = min(height, max(1, round(bucket.height / scale)))
    kept_w = min(width, max(1, round(bucket.width / scale)))
    return Crop((height - kept_h) // 2, (width - kept_w) // 2, kept_h, kept_w, scale)


def _resized(frame: Tensor, height: int, width: int) -> Tensor:
    """Resize one frame. Args: frame: uint8 [3, h, w]. Returns: float32 in [0, 255]."""
    values = frame.float()
    if values.shape[-2:] == (height, width):
        return values
    resized = F.interpolate(values[None], size=(height, width), mode="bicubic", antialias=True)
    return resized[0].clamp_(0, 255)  # bicubic overshoots at edges
