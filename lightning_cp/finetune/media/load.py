"""Load a source as the pixels of a bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lightning_cp.errors import MediaError
from lightning_cp.finetune.media.buckets import MAX_UPSCALE, Bucket, Crop, centre_crop, fit, nearest_bucket
from lightning_cp.finetune.media.failures import failures_of
from lightning_cp.finetune.media.images import BLACK, image_size, read_image
from lightning_cp.finetune.media.source import Source, is_video
from lightning_cp.finetune.media.videos import ShortClipError, probe, read_clip, read_sound, resampled_frames


@dataclass(frozen=True)
class LoadedMedia:
    """Pixels of a source.

    Args:
        pixels: float32 [3, f, h, w] in [-1, 1], f = 1 for images.
        bucket: their size.
        crop: the part of the image or video that they show.
        fps: frames per second; None for images.
        reference: float32 [3, 1, h, w] in [-1, 1], or [3, f, h, w] of a video; None if the source has none.
        mask: float32 [1, h, w] in [0, 1], like the pixels; None if the source has none.
        sound: float32 [2, samples] in [-1, 1]; None without `sound_rate`, and for sources without an audio track.
    """

    pixels: Tensor
    bucket: Bucket
    crop: Crop
    fps: float | None
    reference: Tensor | None
    sound: Tensor | None = None
    mask: Tensor | None = None


def load_media(
    source: Source,
    buckets: Sequence[Bucket],
    *,
    fps: float | None = None,
    max_upscale: float = MAX_UPSCALE,
    reference_size: Callable[..., tuple[int, int]] | None = None,
    sound_rate: int | None = None,
) -> LoadedMedia:
    """Read a source, choose its bucket with `nearest_bucket`, and crop and resize it with `fit`.

    Reference and mask are cropped and resized, too. Of a reference video, the same time is read.

    Args:
        buckets: one, or several to choose from.
        fps: frames per second of clips; None: the rate of the video.
        max_upscale: largest factor of enlargement.
        reference_size: returns height and width of the reference from those of the bucket (`Family.reference_size`);
            None: the same.
        sound_rate: also read the sound of videos, with this number of samples per second.
    Raises: MediaError: the file, or its reference, cannot be used; names the file and the reason. No other exception
        leaves this function but MemoryError.
    """
    with failures_of(source.file):
        if source.is_video:
            pixels, bucket, rate = _read_video(source, buckets, fps, max_upscale)
        else:
            pixels, rate = read_image(source.file).unsqueeze(1), None
            bucket = nearest_bucket(buckets, 1, *pixels.shape[-2:], max_upscale=max_upscale)
        fitted, crop = fit(pixels, bucket, max_upscale=max_upscale)
        reference = sound = mask = None
        if source.mask is not None:
            mask = _read_mask(source.mask, pixels, bucket, max_upscale)
        if sound_rate is not None and rate is not None:
            sound = read_sound(source.file, rate=sound_rate, start_s=source.start_s, duration_s=bucket.frames / rate)
        if source.reference is not None:
            with failures_of(source.reference):
                if is_video(source.reference):
                    read = _read_control(source, source.reference, bucket.frames, fps, rate)
                else:
                    read = read_image(source.reference).unsqueeze(1)
                target = Bucket(read.shape[1], *_reference_size(bucket, reference_size))
                reference, _ = fit(read, target, max_upscale=max_upscale)
    return LoadedMedia(fitted, bucket, crop, rate, reference, sound, mask)


def check_header(
    source: Source,
    buckets: Sequence[Bucket],
    *,
    fps: float | None = None,
    max_upscale: float = MAX_UPSCALE,
    reference_size: Callable[..., tuple[int, int]] | None = None,
) -> None:
    """Check by headers that a source is long and large enough, with its mask and reference.

    Args, Raises: see `load_media`.
    """
    with failures_of(source.file):
        if source.is_video:
            info = probe(source.file)
            frames = resampled_frames(info, fps=fps, start_s=source.start_s, end_s=source.end_s)
            height, width = info.height, info.width
        else:
            frames, (height, width) = 1, image_size(source.file)
        bucket = nearest_bucket(buckets, frames, height, width, max_upscale=max_upscale)
        centre_crop(height, width, bucket, max_upscale=max_upscale)
    if source.mask is not None:
        with failures_of(source.mask):
            _check_mask(image_size(source.mask), (height, width))
    if source.reference is not None:
        with failures_of(source.reference):
            video = probe(source.reference) if is_video(source.reference) else None
            size = image_size(source.reference) if video is None else (video.height, video.width)
            target = Bucket(1, *_reference_size(bucket, reference_size))
            centre_crop(*size, target, max_upscale=max_upscale)


def _reference_size(bucket: Bucket, size: Callable[..., tuple[int, int]] | None) -> tuple[int, int]:
    return (bucket.height, bucket.width) if size is None else size(height=bucket.height, width=bucket.width)


def _check_mask(size: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if size != expected:
        raise MediaError(
            f"is a mask of {size[1]}x{size[0]} pixels, but its picture or clip has {expected[1]}x{expected[0]}: both "
            "must have the same size"
        )


def _read_mask(file: Path, pixels: Tensor, bucket: Bucket, max_upscale: float) -> Tensor:
    with failures_of(file):
        read = read_image(file, background=BLACK).unsqueeze(1)
        _check_mask(read.shape[-2:], pixels.shape[-2:])
        fitted, _ = fit(read, Bucket(1, bucket.height, bucket.width), max_upscale=max_upscale)
    return fitted.mean(dim=0).add_(1).div_(2)


def _read_control(source: Source, file: Path, frames: int, fps: float | None, rate: float | None) -> Tensor:
    """Read the frames of a reference video that belong to a clip. Args: fps, rate: as set, and of the clip."""
    found = probe(file).fps
    if fps is None and rate is not None and not math.isclose(found, rate, rel_tol=1e-3):
        raise MediaError(
            f"has {found:g} frames per second, but {source.file.name} has {rate:g}: set one rate for both, such as "
            f"precompute.fps={rate:g}"
        )
    return read_clip(file, frames=frames, fps=fps, start_s=source.start_s, end_s=source.end_s)


def _read_video(
    source: Source, buckets: Sequence[Bucket], fps: float | None, max_upscale: float
) -> tuple[Tensor, Bucket, float]:
    info = probe(source.file)
    available = resampled_frames(info, fps=fps, start_s=source.start_s, end_s=source.end_s)
    while True:
        bucket = nearest_bucket(buckets, available, info.height, info.width, max_upscale=max_upscale)
        centre_crop(info.height, info.width, bucket, max_upscale=max_upscale)  # refuse before decoding
        try:
            clip = read_clip(source.file, frames=bucket.frames, fps=fps, start_s=source.start_s, end_s=source.end_s)
        except ShortClipError as error:  # files often say that they are a few frames longer than they are
            if not any(other.frames <= error.available for other in buckets):
                raise
            available = error.available
            continue
        return clip, bucket, info.fps if fps is None else fps
