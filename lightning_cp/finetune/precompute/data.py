"""Find the media of a run, and the sizes that each folder's media are cropped to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_cp.errors import FamilyError
from lightning_cp.finetune.families import Family
from lightning_cp.finetune.media import DataFolder, Source, Sources, find_in_folders
from lightning_cp.finetune.precompute.settings import PrecomputeSettings
from lightning_cp.finetune.precompute.sizes import buckets_of
from lightning_cp.finetune.precompute.usable import Buckets, check_none_skipped, check_output, check_rate, usable


def find_data(folders: Sequence[DataFolder], output: Path, settings: PrecomputeSettings) -> Sources:
    """Find the media of all folders; archives are unpacked next to the output."""
    for folder in folders:
        check_output(output, folder.path)
    return find_in_folders(
        folders,
        captions=settings.captions,
        unpack_to=output.with_name(f"{output.name}_media"),
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
