"""Choose the sizes that media are encoded at."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning_cp.errors import FamilyError
from lightning_cp.finetune.families import Family
from lightning_cp.finetune.media import Bucket, default_buckets, explicit_buckets


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
    """Return the default of an argument of the pipeline's call; None if it has none."""
    call = inspect.signature(type(pipe).__call__).parameters
    default = call[name].default if name in call else None
    return default if isinstance(default, int) else None


def _config(pipe: Any, family: Family) -> Mapping[str, Any]:
    """Return the config of the pipeline's transformer."""
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
