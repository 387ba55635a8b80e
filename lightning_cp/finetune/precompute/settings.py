"""Settings and result of a precompute run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from lightning_cp.finetune.media import Skipped


@dataclass(frozen=True, kw_only=True)
class PrecomputeSettings:
    """Settings for encoding media.

    Args:
        captions: `required`: media without a caption are skipped; `optional`: they get the empty caption.
        sizes: pairs (height, width); None: see `buckets_of`.
        frames: frames per clip, or several numbers; None: the pipeline's default, and 1 for images.
        fps: frames per second of clips; None: the file's.
        clips: `first`: one clip from the beginning of each video; `all`: as many as it has, one after another.
        max_upscale: media that would be enlarged more are skipped.
        dtype: dtype of the text encoders, and of the stored text.
        vae_dtype: dtype of the VAE, and of the stored latents.
        text_batch: captions that are encoded together.
        tiling: encode in tiles, for media that are too large for the VAE at once. Seams can differ slightly.
        vae_ranks: number of ranks that encode one picture or clip together.
        workers: threads of each rank that read files.
        on_bad: treatment of a file that cannot be used: skip, error.
        image_noise: add noise to the first frames that CogVideoX image to video is conditioned on.
        sheet: number of samples on the contact sheet; 0: none.
    """

    captions: Literal["required", "optional"] = "required"
    sizes: Sequence[Sequence[int]] | None = None
    frames: int | Sequence[int] | None = None
    fps: float | None = None
    clips: Literal["first", "all"] = "first"
    max_upscale: float = 1.5
    dtype: torch.dtype = torch.bfloat16
    vae_dtype: torch.dtype = torch.float32
    text_batch: int = 8
    tiling: bool = False
    vae_ranks: int = 1
    workers: int = 2
    on_bad: Literal["skip", "error"] = "skip"
    image_noise: bool = False
    sheet: int = 16

    def plain(self) -> dict[str, Any]:
        """Return all settings as JSON values."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    def identity(self) -> dict[str, Any]:
        """Return the settings that samples depend on, in a form that is equal for settings with the same meaning."""
        names = ("fps", "clips", "dtype", "vae_dtype", "tiling", "max_upscale", "image_noise")
        sizes, frames = self.sizes, self.frames
        return {
            "sizes": None if sizes is None else sorted({tuple(size) for size in sizes}),
            "frames": frames if frames is None else sorted({frames} if isinstance(frames, int) else set(frames)),
            **{name: _plain(getattr(self, name)) for name in names},
        }


@dataclass(frozen=True)
class Precomputed:
    """Result of a run. `found` is the sum of `encoded`, `stored` and the number of `skipped`.

    Attributes:
        found: number of sources.
        encoded: samples that this run encoded.
        stored: samples that an earlier run had stored.
        captions: distinct captions, with the empty one; if the text encoder sees the media, captions of all samples.
        skipped: files that could not be used.
        changed: samples that were stored with other contents; they are among the encoded or skipped ones.
        dropped: stored samples that are no longer in the data.
        encoded_captions: captions that this run encoded.
    """

    found: int
    encoded: int
    stored: int
    captions: int
    skipped: tuple[Skipped, ...]
    changed: int = 0
    dropped: int = 0
    encoded_captions: int = 0


def _plain(value: Any) -> Any:
    """Convert the value of a setting to JSON values."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
