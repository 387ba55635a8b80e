"""Write all samples of a run: one file per sample, and one contact sheet."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import interpolate

from lightning_cp.comm.agree import gather_objects
from lightning_cp.errors import MediaError
from lightning_cp.files import writing
from lightning_cp.pipelines.prompts import ClipWithSound
from lightning_cp.recipes.sampling.media import frames_of, is_sound, keep_arrays, write_sample
from lightning_cp.sampling.tiles import tile, write_png

_FRAMES = 8
_MARGIN = 6
_PIXELS = 128  # longer side of a thumbnail


@dataclass(eq=False)
class Album:
    """A folder of numbered samples. Each rank writes its own samples into the same folder.

    Args: folder: folder of the sample files. format, fps, rate_hz: see `write_sample`.
    """

    folder: Path
    format: str = "auto"
    fps: int = 16
    rate_hz: int = 44100
    thumbnails: dict[int, Tensor] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, number: int, sample: Any) -> Path:
        """Write a sample as `<number>.<suffix>`. Returns: path of the file.

        A sample that cannot be written is kept as NumPy arrays, so that no result is lost: `draw_sheet` raises later.
        """
        stem = self.folder / f"{number:04d}"
        try:
            path = write_sample(sample, stem, format=self.format, fps=self.fps, rate_hz=self.rate_hz)
        except Exception as error:
            path = stem.with_suffix(".npz")
            with writing(path, "The samples before it are kept"):
                keep_arrays(sample, path)
            self.failures.append(f"sample {number} could not be written ({error}); its values are kept in {path}")
            return path
        if not is_sound(sample):
            frames = sample.frames if isinstance(sample, ClipWithSound) else sample
            self.thumbnails[number] = thumbnail(frames_of(frames))
        return path

    def draw_sheet(self, path: Path) -> bool:
        """Write one picture of all ranks' samples, sorted by number; a clip is a row of frames.

        Ranks: the whole world; the first rank writes. Returns: False if there is nothing to show (sounds only).
        Raises: MediaError, on every rank: samples could not be written, and are kept as arrays.
        """
        gathered = gather_objects((self.thumbnails, self.failures), dist.group.WORLD)
        failures = [text for _, some in gathered for text in some]
        if failures:
            more = f", and so are {len(failures) - 1} more" if len(failures) > 1 else ""
            raise MediaError(f"{failures[0]}{more}. Read them with numpy.load")
        pictures_by_number = {number: picture for thumbnails, _ in gathered for number, picture in thumbnails.items()}
        if not pictures_by_number or (dist.is_initialized() and dist.get_rank() != 0):
            return bool(pictures_by_number)
        pictures = _pad_to_one_size(
            [pictures_by_number[number] for number in sorted(pictures_by_number)]
        )  # [n, c, f, h, w]
        samples = pictures[:, :, 0] if pictures.shape[2] == 1 else pictures
        write_png(tile(samples, value_range=(0, 255), margin=_MARGIN), path)
        return True


def thumbnail(frames: Tensor) -> Tensor:
    """Resize to at most 8 frames of at most 128 pixels; enlarge small pictures: [f, h, w, c] -> [3, f, h, w], uint8."""
    chosen = torch.linspace(0, len(frames) - 1, min(_FRAMES, len(frames))).round().long()
    pixels = frames[chosen][..., :3].movedim(-1, 1).float()
    scale = _PIXELS / max(pixels.shape[-2:])
    if scale < 1:
        pixels = interpolate(pixels, scale_factor=scale, mode="area", recompute_scale_factor=True)
    elif scale >= 2:
        pixels = interpolate(pixels, scale_factor=float(int(scale)), mode="nearest")
    return pixels.round().to(torch.uint8).expand(-1, 3, -1, -1).transpose(0, 1).contiguous()


def _pad_to_one_size(pictures: list[Tensor]) -> Tensor:
    """Pad pictures to one size: white at the right and bottom; shorter clips repeat their last frame."""
    frames, height, width = (max(x.shape[dim] for x in pictures) for dim in (1, 2, 3))
    sheet = torch.full((len(pictures), 3, frames, height, width), 255, dtype=torch.uint8)
    for target, x in zip(sheet, pictures):
        target[:, : x.shape[1], : x.shape[2], : x.shape[3]] = x
        target[:, x.shape[1] :, : x.shape[2], : x.shape[3]] = x[:, -1:]
    return sheet
