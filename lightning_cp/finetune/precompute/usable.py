"""Find the media of a run, choose their sizes, and decide which ones the family can train on before any is read."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_cp.errors import DataError, FamilyError, MediaError
from lightning_cp.finetune.families import Family
from lightning_cp.finetune.latent_cache.index import INDEX
from lightning_cp.finetune.media import (
    Bucket,
    DataFolder,
    Skipped,
    Source,
    Sources,
    default_buckets,
    explicit_buckets,
    find_in_folders,
)
from lightning_cp.finetune.media.source import first_reasons, is_image, is_video
from lightning_cp.finetune.settings import PrecomputeSettings, Sizes


def default_size(pipe: Any, family: Family) -> Bucket:
    """Return the size that the pipeline samples by default, rounded down to the family's grid.

    Raises: FamilyError: the pipeline has no default.
    """
    config, given = _config(pipe, family), family.default_sides(pipe)
    square = getattr(pipe, "default_sample_size", None) or config.get("sample_size")
    scale = getattr(pipe, "vae_scale_factor_spatial", None) or getattr(pipe, "vae_scale_factor", None)
    sides = {}
    for name in ("height", "width"):
        latent = config.get(f"sample_{name}") or square
        side = given.get(name) or _argument(pipe, name) or (latent * scale if latent and scale else None)
        if side is None:
            raise FamilyError(f"{type(pipe).__name__} has no default {name}: set precompute.sizes=[[height,width]]")
        sides[name] = max(side // family.grid.pixels, 1) * family.grid.pixels
    return Bucket(default_frames(pipe, family), height=sides["height"], width=sides["width"])


def default_frames(pipe: Any, family: Family) -> int:
    """Return the number of frames that the pipeline samples by default, on the family's grid; 1 for pictures."""
    if not family.grid.frame_step:
        return 1
    frames: int = _argument(pipe, "num_frames") or _config(pipe, family).get("sample_frames") or family.default_frames
    return family.grid.frames_up_to(frames)


def _argument(pipe: Any, name: str) -> int | None:
    call = inspect.signature(type(pipe).__call__).parameters
    default = call[name].default if name in call else None
    return default if isinstance(default, int) else None


def _config(pipe: Any, family: Family) -> Mapping[str, Any]:
    config: Mapping[str, Any] = next(
        x.config for name in family.components.train if (x := getattr(pipe, name, None)) is not None
    )
    return config


def buckets_of(
    pipe: Any,
    family: Family,
    *,
    sizes: Sequence[Sequence[int]] | None,
    frames: int | Sequence[int] | None,
    kinds: Collection[str] = ("image", "video"),
) -> tuple[Bucket, ...]:
    """Return the buckets that media are cropped to.

    Args:
        sizes: pairs (height, width); None: the usual aspect ratios with the area of the pipeline's default size.
        frames: number of frames, or several; None: the pipeline's default for videos, and 1 for images.
        kinds: kinds of the files: image, video.
    Raises: FamilyError: the family does not support a size.
    """
    if frames is None:
        usual = default_frames(pipe, family)
        for_picture = 1 if family.grid.least_frames == 1 else usual
        frames = sorted({usual if kind == "video" else for_picture for kind in kinds}) or [usual]
    if sizes is not None:
        buckets = explicit_buckets(family.grid, sizes=sizes, frames=frames)
        for bucket in buckets:
            _check(family, bucket)
        return buckets
    default = default_size(pipe, family)
    buckets = default_buckets(family.grid, height=default.height, width=default.width, frames=frames)
    taken = tuple(bucket for bucket in buckets if _is_taken(family, bucket))
    if not taken:  # none of the aspect ratios: the default size has the reason
        _check(family, Bucket(buckets[0].frames, default.height, default.width))
    return taken


def _check(family: Family, bucket: Bucket) -> None:
    family.check_size(height=bucket.height, width=bucket.width, frames=bucket.frames)


def _is_taken(family: Family, bucket: Bucket) -> bool:
    try:
        _check(family, bucket)
    except FamilyError:
        return False
    return True


SHEET = "contact_sheet.png"
Buckets = Mapping[Sizes | None, Sequence[Bucket]]
"""Buckets for each value of `Source.sizes`."""


def check_output(output: Path, data: Path) -> None:
    """Raise DataError if the cache would lie in the data folder: its files would be found as data by the next run."""
    if data.is_dir() and output.resolve().is_relative_to(data.resolve()):
        raise DataError(
            f"output={output} is the data folder {data} or lies in it: choose a folder outside, because the pictures "
            "of the cache would become training data of the next run"
        )


def usable(found: Sources, family: Family, buckets: Buckets) -> Sources:
    """Return the sources without those that the family or the buckets exclude, which are skipped with the reason.

    Raises: DataError: no source is left, or only some have references that are optional.
    """
    kept, skipped = list[Source](), list(found.skipped)
    for source in found.sources:
        reason = _reason(source, family, buckets)
        if reason is None:
            kept.append(source)
        else:
            skipped.append(Skipped(source.file, reason))
    some_left(Sources(tuple(kept), tuple(skipped)), of=len(found.sources))
    if family.optional_reference:
        with_one, without = ([x.file for x in kept if (x.reference is None) is none] for none in (False, True))
        if with_one and without:
            raise DataError(
                f"{with_one[0]} has a reference, and {without[0]} has none: {family.name} trains with a reference for "
                "each picture, or without any"
            )
    return Sources(tuple(kept), tuple(skipped))


def some_left(found: Sources, *, of: int) -> Sources:
    """Return the sources. Raises: DataError: all of them are skipped. Args: of: number of sources before."""
    if not found.sources:
        raise DataError(f"none of the {of} pictures and videos can be used: {first_reasons(found.skipped)}")
    return found


def check_rate(family: Family, buckets: Buckets, fps: float | None) -> None:
    """Raise FamilyError if clips of one size could have sound of different lengths, which cannot be in one batch."""
    if (
        family.sound_rate is not None
        and fps is None
        and any(one.frames > 1 for some in buckets.values() for one in some)
    ):
        raise FamilyError(
            f"{family.name} trains on clips with sound, which is as long as their frames are shown: set one frame "
            f"rate for all clips, such as precompute.fps={family.facts['fps']:g}"
        )


def check_none_skipped(skipped: Iterable[Skipped]) -> None:
    """Raise MediaError for the first picture or video that is skipped; other files, such as a README, may be."""
    for one in skipped:
        if is_image(one.file) or is_video(one.file):
            raise MediaError(str(one))


def buckets_for(source: Source, buckets: Buckets) -> Sequence[Bucket]:
    """Return the buckets that a source may be cropped to: pictures never become clips.

    A video becomes a picture, its first frame, only if all buckets have one frame.
    """
    sizes = buckets[source.sizes]
    if source.is_video:
        return [bucket for bucket in sizes if bucket.frames > 1] or sizes
    return [bucket for bucket in sizes if bucket.frames == 1]


def _reason(source: Source, family: Family, buckets: Buckets) -> str | None:
    if source.file.name == SHEET and (source.file.parent / INDEX).is_file():
        return "is the contact sheet of a latent cache"
    if source.is_video and not family.grid.frame_step:
        return f"is a video, but {family.name} trains on pictures"
    if not source.is_video and family.grid.least_frames > 1:
        return f"is a picture, but {family.name} trains on clips of {family.grid.least_frames} frames or more"
    reference = source.reference
    if family.reference_clips and reference is not None and is_video(reference) != source.is_video:
        kinds = ("a video", "a picture") if source.is_video else ("a picture", "a video")
        return f"is {kinds[0]}, but its reference {reference.name} is {kinds[1]}: {family.name} takes two of a kind"
    if reference is not None and is_video(reference) and not family.reference_clips:
        return f"has the video {reference.name} as its reference, but {family.name} takes no control clips"
    if not buckets_for(source, buckets):
        least = min(bucket.frames for bucket in buckets[source.sizes])
        return (
            f"is a picture, but the shortest clips have {least} frames: to train on pictures, too, add 1 to "
            "precompute.frames"
        )
    return None


def find_data(folders: Sequence[DataFolder], output: Path, settings: PrecomputeSettings) -> Sources:
    """Find the media of all folders."""
    for folder in folders:
        check_output(output, folder.path)
    return find_in_folders(
        folders,
        captions=settings.captions,
        clips=settings.clips,
        clip_frames=settings.frames if isinstance(settings.frames, int) else None,
        fps=settings.fps,
    )


def usable_data(found: Sources, pipe: Any, family: Family, settings: PrecomputeSettings) -> tuple[Sources, Buckets]:
    """Return the media that the family can train on, and the buckets of each folder's sizes.

    Raises: FamilyError: a setting or a size does not fit the family. MediaError: a file is skipped with `on_bad=error`.
    """
    if settings.image_noise and not family.takes_image_noise:
        raise FamilyError(
            f"image_noise=true (precompute.image_noise) is for CogVideoX image to video, not for {family.name}: leave "
            "it out"
        )
    kinds = {"video" if source.is_video else "image" for source in found.sources}
    buckets = {
        sizes: buckets_of(pipe, family, sizes=sizes or settings.sizes, frames=settings.frames, kinds=kinds)
        for sizes in {source.sizes for source in found.sources}
    }
    found = usable(found, family, buckets)
    check_rate(family, buckets, settings.fps)
    if settings.on_bad == "error":
        check_none_skipped(found.skipped)
    return found, buckets


def has_masks(sources: Sequence[Source]) -> bool:
    """Return True if a sample has a mask: a mask is then stored for each."""
    return any(source.mask is not None for source in sources)
