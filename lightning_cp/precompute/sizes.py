"""Choose the sizes that media are encoded at."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

from lightning_cp.errors import FamilyError
from lightning_cp.families import Family
from lightning_cp.media import Bucket, default_buckets, explicit_buckets


def default_size(pipe: Any, family: Family) -> Bucket:
    """Return the size that the pipeline samples by default, rounded down to the family's grid."""
    call = inspect.signature(type(pipe).__call__).parameters
    defaults = {name: call[name].default if name in call else None for name in ("height", "width", "num_frames")}
    config = next(x.config for name in family.components.train if (x := getattr(pipe, name, None)) is not None)
    square = getattr(pipe, "default_sample_size", None)
    scale = getattr(pipe, "vae_scale_factor_spatial", None) or getattr(pipe, "vae_scale_factor", None)
    sides = []
    for name in ("height", "width"):
        latent = config.get(f"sample_{name}") or square
        side = defaults[name] or (latent * scale if latent and scale else None)
        if side is None:
            raise FamilyError(f"{type(pipe).__name__} has no default {name}: set precompute.sizes=[[height,width]]")
        sides.append(max(side // family.grid.pixels, 1) * family.grid.pixels)
    step = family.grid.frame_step
    frames = (defaults["num_frames"] or config.get("sample_frames") or 1) if step else 1
    return Bucket((frames - 1) // step * step + 1 if step else 1, *sides)


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
        kinds: which kinds of files there are: image, video.
    Raises: FamilyError: a size that the family does not take.
    """
    default = default_size(pipe, family)
    if frames is None:
        frames = sorted({default.frames if kind == "video" else 1 for kind in kinds}) or [default.frames]
    if sizes is not None:
        buckets = explicit_buckets(family.grid, sizes=sizes, frames=frames)
        for bucket in buckets:
            family.check_size(height=bucket.height, width=bucket.width, frames=bucket.frames)
        return buckets
    family.check_size(height=default.height, width=default.width, frames=default.frames)
    buckets = default_buckets(family.grid, height=default.height, width=default.width, frames=frames)
    return tuple(bucket for bucket in buckets if _is_taken(family, bucket))


def _is_taken(family: Family, bucket: Bucket) -> bool:
    try:
        family.check_size(height=bucket.height, width=bucket.width, frames=bucket.frames)
    except FamilyError:
        return False
    return True
