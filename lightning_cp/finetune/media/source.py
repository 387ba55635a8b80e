"""Describe where training samples come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_cp.finetune.settings import Sizes, Use

IMAGE_SUFFIXES = (".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
VIDEO_SUFFIXES = (
    *(".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts"),
    *(".webm", ".wmv"),
)
ONE_REFERENCE = (
    "training takes one reference of each sample, also of models that can sample with several; keep one, or join the "
    "pictures to one"
)


@dataclass(frozen=True)
class Source:
    """One image, video or clip of a video with its captions.

    Args:
        id: unique name that depends neither on the order of the files nor on where the data set lies: the path
            relative to the folder or table, and the range of a clip.
        file: the image or video.
        captions: one or more; ("",) to train with the empty caption.
        repeats: number of times that an epoch has this source.
        start_s: start of the clip in seconds from the first frame; 0 for images.
        end_s: end of the clip in seconds from the first frame, excluded; None: to the end of the video.
        reference: an image that belongs to the sample, for models that edit images; or a control image or video.
        mask: an image of the same size, with the weight of each pixel in the loss: white 1, black 0.
        origin: path of the file, relative to the folder or table: sources with the same one are of the same file.
        sizes: sizes to crop to; None: those of the whole data set.
        weight, use: see `DataFolder`.
    """

    id: str
    file: Path
    captions: tuple[str, ...]
    repeats: int = 1
    start_s: float = 0.0
    end_s: float | None = None
    reference: Path | None = None
    mask: Path | None = None
    origin: str = ""
    sizes: Sizes | None = None
    weight: float = 1.0
    use: Use = "train"

    @property
    def files(self) -> tuple[Path, ...]:
        """All files of the sample: the image or video, and its reference and mask if it has them."""
        return tuple(file for file in (self.file, self.reference, self.mask) if file is not None)

    @property
    def is_video(self) -> bool:
        """Return True for a video, False for an image (an animated GIF or WebP is an image: its first frame)."""
        return is_video(self.file)


@dataclass(frozen=True)
class Skipped:
    """A file that is not used, and why. The reason does not begin with the file's name."""

    file: Path
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", self.reason.removeprefix(f"{self.file}: "))

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


@dataclass(frozen=True)
class Sources:
    """Content of a folder or table.

    Args:
        sources: in the order of the table, or sorted by path.
        skipped: files that are left out.
    """

    sources: tuple[Source, ...]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class Entry:
    """A source as found, before captions are required and videos are cut into clips.

    Args:
        source: with empty `captions` if there are none.
        path: path relative to the folder or table, with forward slashes.
        where: file, or table and line, for errors.
        frame_range: first frame and number of frames of a clip that is given in frames, not in seconds.
    """

    source: Source
    path: str
    where: str
    frame_range: tuple[int, int] | None = None


def is_image(file: Path) -> bool:
    """Return True if the suffix is that of an image."""
    return file.suffix.lower() in IMAGE_SUFFIXES


def is_video(file: Path) -> bool:
    """Return True if the suffix is that of a video."""
    return file.suffix.lower() in VIDEO_SUFFIXES


def first_reasons(skipped: Sequence[Skipped]) -> str:
    """Return up to three files with different reasons, pictures and videos first; "" if there are none."""
    media_first = sorted(skipped, key=lambda one: not (is_image(one.file) or is_video(one.file)))
    by_reason = {one.reason: one for one in reversed(media_first)}
    return "; ".join([f"{one.file.name}: {one.reason}" for one in media_first if by_reason[one.reason] is one][:3])


def accepted_suffixes() -> str:
    """Return the suffixes of usable files, for errors."""
    return f"images: {' '.join(IMAGE_SUFFIXES)}; videos: {' '.join(VIDEO_SUFFIXES)}"


def clip_id(path: str, start_s: float, end_s: float | None) -> str:
    """Return the id of a clip: `path`, or `path#start-end` in seconds, to the microsecond, if it is not the whole file.

    Args: path: relative path of the file with forward slashes.
    """
    if start_s == 0 and end_s is None:
        return path
    return f"{path}#{_seconds(start_s)}-{'' if end_s is None else _seconds(end_s)}"


def _seconds(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".")
