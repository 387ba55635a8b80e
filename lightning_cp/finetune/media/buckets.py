"""Choose the sizes that training media are cropped to, so that batches have equal shapes; crop and resize them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_cp.errors import FamilyError, MediaError
from lightning_cp.finetune.families.family import Grid

MAX_UPSCALE = 1.5  # larger factors teach the model visible blur
ASPECTS = (1.0, 4 / 3, 3 / 2, 16 / 9, 2.0)  # width / height; their inverses are added


@dataclass(frozen=True, order=True)
class Bucket:
    """Size of media in a batch: frames, and height and width in pixels. Ordered by these."""

    frames: int
    height: int
    width: int


def default_buckets(grid: Grid, *, height: int, width: int, frames: int | Sequence[int] = 1) -> tuple[Bucket, ...]:
    """Return buckets of the usual aspect ratios with the area of a given size or a little less, on the family's grid.

    No bucket has more pixels than `height` x `width`, so that all fit the memory that this size needs.

    Args:
        height, width: size with the largest area, in pixels; it is a bucket, too.
        frames: number of frames, or several: each bucket exists once for each. Add 1 to train on images, too.
    Raises: FamilyError: sizes that are not on the grid; names the nearest that are.
    """
    every = [ratio for aspect in ASPECTS for ratio in (aspect, 1 / aspect)]
    sizes = {(height, width), *(_size(grid.pixels, height * width, ratio) for ratio in every)}
    return explicit_buckets(grid, sizes=sorted(sizes), frames=frames)


def explicit_buckets(
    grid: Grid, *, sizes: Iterable[Sequence[int]], frames: int | Sequence[int] = 1
) -> tuple[Bucket, ...]:
    """Return a bucket for each size and number of frames, in ascending order.

    Args: sizes: pairs (height, width).
    Raises: FamilyError: sizes that are not on the grid; names the nearest that are.
    """
    counts = (frames,) if isinstance(frames, int) else tuple(frames)
    pairs = [tuple(size) for size in sizes]
    if not (pairs and counts):
        raise FamilyError("at least one size and one number of frames must be given")
    for count, pair in product(counts, pairs):
        if len(pair) != 2:
            raise FamilyError(f"sizes must be pairs [height, width], got {list(pair)}")
        grid.check(height=pair[0], width=pair[1], frames=count)
    return tuple(sorted({Bucket(count, h, w) for count, (h, w) in product(counts, pairs)}))


def nearest_bucket(
    buckets: Sequence[Bucket], frames_available: int, height: int, width: int, *, max_upscale: float = MAX_UPSCALE
) -> Bucket:
    """Return the bucket with the nearest aspect ratio (by its logarithm), then with the most frames that are available.

    Of buckets that differ in their area only, it is the largest that needs no enlargement. A bucket that needs more
    than `max_upscale` is chosen only if all do; `fit` then refuses it.

    Args:
        frames_available: number of frames of the video at the wanted rate; 1 for images.
        height, width: size of the video or image, in pixels.
    Raises: MediaError: all buckets have more frames.
    """
    fitting = [bucket for bucket in buckets if bucket.frames <= frames_available]
    if not fitting:
        least = min(bucket.frames for bucket in buckets)
        raise MediaError(f"has {_count(frames_available)}, but the shortest bucket has {least}")
    scales = {bucket: max(bucket.height / height, bucket.width / width) for bucket in fitting}
    fitting = [bucket for bucket in fitting if scales[bucket] <= max_upscale] or fitting

    def preference(bucket: Bucket) -> tuple[float, ...]:
        distance = abs(math.log(bucket.width / bucket.height) - math.log(width / height))
        area = bucket.height * bucket.width
        enlarged = scales[bucket] > 1
        return round(distance, 9), -bucket.frames, enlarged, area if enlarged else -area

    return min(fitting, key=preference)


def _size(step: int, area: int, aspect: float) -> tuple[int, int]:
    """Return (height, width) in multiples of `step`, with at most `area` pixels, near to an aspect ratio and the area.

    Of the four sizes around the exact one, take the one with the least sum of relative errors of ratio and side.
    """
    exact_h, exact_w = math.sqrt(area / aspect), math.sqrt(area * aspect)
    sizes = [
        (h * step, w * step)
        for h, w in product(_around(exact_h / step), _around(exact_w / step))
        if h * w * step * step <= area
    ]

    def error(size: tuple[int, int]) -> float:
        h, w = size
        return abs(math.log(w / h / aspect)) + 0.5 * math.log(area / (h * w))

    return min(sizes, key=error) if sizes else (step, step)


def _around(value: float) -> tuple[int, int]:
    floor = max(1, math.floor(value + 1e-9))
    return floor, floor + 1


def _count(frames: int) -> str:
    return "1 frame" if frames == 1 else f"{frames} frames"


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
    values = frame.float()
    if values.shape[-2:] == (height, width):
        return values
    resized = F.interpolate(values[None], size=(height, width), mode="bicubic", antialias=True)
    return resized[0].clamp_(0, 255)  # bicubic overshoots at edges
