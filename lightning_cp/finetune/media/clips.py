"""Cut videos into clips."""

from __future__ import annotations

from dataclasses import replace

from lightning_cp.errors import MediaError
from lightning_cp.finetune.media.limits import BYTES_PER_CLIP
from lightning_cp.finetune.media.source import Entry, Source, clip_id
from lightning_cp.finetune.media.videos import probe, resampled_frames


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
