"""Find the images, videos and captions of a training set, and cut videos into clips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_cp.errors import DataError, MediaError
from lightning_cp.finetune.media.decoder import require_pyav
from lightning_cp.finetune.media.folder import read_folder
from lightning_cp.finetune.media.limits import BYTES_PER_CLIP
from lightning_cp.finetune.media.source import (
    Entry,
    Skipped,
    Source,
    Sources,
    accepted_suffixes,
    clip_id,
    first_reasons,
)
from lightning_cp.finetune.media.table import METADATA, read_table
from lightning_cp.finetune.media.videos import probe, resampled_frames
from lightning_cp.finetune.settings import TABLE_SUFFIXES, DataFolder, PrecomputeSettings
from lightning_cp.rules import rules_of


def find_sources(
    path: str | Path,
    *,
    captions: str = "required",
    clips: str = "first",
    clip_frames: int | None = None,
    fps: float | None = None,
    caption_column: str | None = None,
) -> Sources:
    """Find the images and videos of a folder or table, with their captions.

    Folder: all images and videos in it and below it, without hidden files. The captions of `a/b.mp4` are the non-empty
    lines of `a/b.txt`, and `a/b.reference.png` is its reference. Links to folders are followed, but each
    folder is read once.

    Table: a `.csv` file with a header, or a `.jsonl` file with one object per line. Columns or keys: `file`, relative
    to the table's folder; `caption`, or `captions`, a JSON list; optional `repeats`, `reference`, and the range of a
    clip: `start_s` and `end_s`, or `start_frame` and `frames`. A folder with `metadata.jsonl` or `metadata.csv` is read
    as this table, in the format of Hugging Face's imagefolder: `file_name`, `text` and other columns.

    Args:
        path: a folder, or a table.
        captions: `required`: skip files without a caption; `optional`: give them the empty caption.
        clips: `first`: one source per video, or per range in the table. `all`: cut each into as many consecutive clips
            of `clip_frames` as it has, without the frames that remain at the end. Videos are then opened to read their
            duration.
        clip_frames: frames of a clip with `clips=all`.
        fps: frames per second of a clip with `clips=all`; None: the video's rate.
        caption_column: column of a table with the captions, if it has another name.
    Raises:
        DataError: `path` is missing or has no usable file or no caption, a row or a caption file is invalid, or two
            rows describe the same clip.
        MediaError: there are videos, but PyAV is not installed.
    """
    _check_options(clip_frames, captions=captions, clips=clips, fps=fps)
    path = Path(path).expanduser()
    path = next((path / name for name in METADATA if (path / name).is_file()), path)
    entries, skipped = _read(path, caption_column)
    if not entries:
        raise DataError(f"{path} has no usable file{_first_reasons(skipped)}. Usable are {accepted_suffixes()}")
    _check_unique([(entry.source.id, entry.where) for entry in entries])
    entries = _with_captions(path, entries, skipped, captions)
    if any(entry.source.is_video for entry in entries):
        require_pyav()
    found: list[tuple[Source, str]] = []
    for entry in entries:
        if not entry.source.is_video or (clips == "first" and entry.frame_range is None):
            found.append((entry.source, entry.where))
            continue
        try:
            clip_sources = cut_clips(entry, clip_frames=clip_frames if clips == "all" else None, fps=fps)
        except MediaError as error:
            skipped.append(Skipped(entry.source.file, str(error)))
            continue
        found.extend((source, entry.where) for source in clip_sources)
    if not found:
        raise DataError(f"{path} has no usable file{_first_reasons(skipped)}")
    _check_unique([(source.id, where) for source, where in found])
    root = path if path.is_dir() else path.parent
    sources = [replace(source, origin=_relative(source.file, root)) for source, _ in found]
    return Sources(tuple(sources), tuple(skipped))


def _relative(file: Path, root: Path) -> str:
    return str(file.relative_to(root) if file.is_relative_to(root) else file)


def _check_options(clip_frames: int | None, **options: Any) -> None:
    rules = rules_of(PrecomputeSettings)
    for name, value in options.items():
        if not rules[name].passes(value):
            raise DataError(f"{name}={value} must be {rules[name].describe()}")
    if options["clips"] == "all" and (clip_frames is None or clip_frames < 1):
        raise DataError(f"clips=all needs the length of a clip: set clip_frames to 1 or more, got {clip_frames}")


def _read(path: Path, caption_column: str | None) -> tuple[list[Entry], list[Skipped]]:
    if path.is_dir():
        if caption_column is not None:
            raise DataError(f"caption_column={caption_column} is for tables, but {path} is a folder without a table")
        return read_folder(path)
    if not path.exists() or path.suffix.lower() not in TABLE_SUFFIXES:
        problem = "is not valid" if path.exists() else "does not exist"
        raise DataError(f"{path} {problem}: must be {rules_of(DataFolder)['path'].describe()}")
    return read_table(path, caption_column)


def _with_captions(path: Path, entries: list[Entry], skipped: list[Skipped], rule: str) -> list[Entry]:
    """Return the entries to use. Args: skipped: gets the others."""
    kept = []
    for entry in entries:
        if entry.source.captions:
            kept.append(entry)
        elif rule == "optional":
            kept.append(replace(entry, source=replace(entry.source, captions=("",))))
        else:
            skipped.append(Skipped(entry.source.file, _no_caption(path, entry)))
    if not kept:
        raise DataError(
            f"{path}: none of the {len(entries)} files has a caption ({_no_caption(path, entries[0])}). "
            "Write captions, name the column of a table (caption_column), or set data.captions=optional to train with "
            "the empty caption"
        )
    return kept


def _no_caption(path: Path, entry: Entry) -> str:
    if path.is_dir():
        return f"no caption: {entry.source.file.with_suffix('.txt').name} is missing or empty"
    return f"no caption in {entry.where}"


def _check_unique(found: Sequence[tuple[str, str]]) -> None:
    """Raise DataError if two sources have one id. Args: found: pairs (id, where it was found)."""
    seen: dict[str, str] = {}
    for id, where in found:
        if id in seen:
            raise DataError(
                f"{where}: {id} was already given in {seen[id]}. A file, or clip of a video, may occur once: give "
                "several captions as a list (captions), and use repeats to train on it more often"
            )
        seen[id] = where


def _first_reasons(skipped: Sequence[Skipped]) -> str:
    if not skipped:
        return ""
    return f" ({len(skipped)} skipped, such as {first_reasons(skipped)})"


def cut_clips(entry: Entry, *, clip_frames: int | None, fps: float | None) -> list[Source]:
    """Return the clips of a video as sources with a range in seconds.

    Args:
        entry: a video, or a range of it.
        clip_frames: frames of each of the consecutive clips; None: keep the range as one clip.
        fps: frames per second of the clips; None: the video's rate.
    Raises: MediaError: the video cannot be opened, ends before the range, or is too short for one clip.
    """
    source = entry.source
    info = probe(source.file)
    start, end = source.start_s, source.end_s
    if entry.frame_range is not None:
        first, count = entry.frame_range
        available = resampled_frames(info, fps=None)
        if first + count > available:
            raise MediaError(
                f"{source.file}: has {available} frames, "
                f"but start_frame={first} and frames={count} need {first + count}"
            )
        start, end = first / info.fps, (first + count) / info.fps
    if clip_frames is None:
        return [_clip(source, source.id, start, end)]
    rate = info.fps if fps is None else fps
    available = resampled_frames(info, fps=rate, start_s=start, end_s=end)
    if available < clip_frames:
        raise MediaError(
            f"{source.file}: has {available} frames at {rate:g} frames per second, fewer than the {clip_frames} of a "
            "clip (clip_frames; in the recipes precompute.frames, and data.frames for data=folder)"
        )
    size = source.file.stat().st_size
    if available // clip_frames > size // BYTES_PER_CLIP:
        raise MediaError(
            f"{source.file}: cannot have {available // clip_frames} clips of clip_frames={clip_frames}, as its header "
            f"says ({info.duration_s:g} s at {rate:g} frames per second), because it has only {size} bytes: its header "
            "is damaged"
        )
    length_s = clip_frames / rate
    starts = [start + i * length_s for i in range(available // clip_frames)]
    return [_clip(source, clip_id(entry.path, s, s + length_s), s, s + length_s) for s in starts]


def _clip(source: Source, id: str, start_s: float, end_s: float | None) -> Source:
    rounded = None if end_s is None else round(end_s, 6)
    return replace(source, id=id, start_s=round(start_s, 6), end_s=rounded)
