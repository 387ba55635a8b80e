"""Choose the frames of a clip by their presentation times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_cp.finetune.media.decoder import CLOCK_S, Frame


@dataclass(frozen=True)
class Span:
    """Wanted times of a clip's frames, in seconds from the first frame of the video.

    Args:
        start_s: time of the first frame.
        end_s: frames from this time on are not used; None: all are.
        fps: frames per second; None: consecutive frames as stored.
    """

    start_s: float
    end_s: float | None
    fps: float | None

    def ends_before(self, frame: Frame) -> bool:
        """Return True if a frame begins at or after the end."""
        return self.end_s is not None and frame.time_s >= self.end_s - CLOCK_S


def choose_frames(frames: Iterator[Frame], span: Span, *, frame_s: float) -> Iterator[Frame]:
    """Yield the frames of a clip; a frame may repeat. Ends with the video or the span.

    Args:
        frames: in the order of presentation, from a time at or before the start.
        frame_s: duration of frames that have none in the file.
    """
    if span.fps is None:
        return _consecutive(frames, span, frame_s)
    return _nearest(frames, span, span.fps, frame_s)


def _consecutive(frames: Iterator[Frame], span: Span, frame_s: float) -> Iterator[Frame]:
    """Yield the frame nearest to the start, and all frames after it."""
    before: Frame | None = None
    for frame in frames:
        if span.ends_before(frame):
            break
        if frame.time_s < span.start_s:
            before = frame
            continue
        if before is not None and _is_nearest(before, frame, span.start_s):
            yield before
        before = None
        yield frame
    if before is not None and span.start_s < before.time_s + (before.duration_s or frame_s) - CLOCK_S:
        yield before  # no frame begins later, and this one is still shown


def _nearest(frames: Iterator[Frame], span: Span, fps: float, frame_s: float) -> Iterator[Frame]:
    """Yield the frame nearest to `start_s + i / fps` for each i."""
    before: Frame | None = None
    shown_until_s = 0.0
    i = 0
    for frame in frames:
        if span.ends_before(frame):
            shown_until_s = span.end_s or 0.0
            break
        while (wanted_s := span.start_s + i / fps) <= frame.time_s:
            yield before if before is not None and _is_nearest(before, frame, wanted_s) else frame
            i += 1
        before, shown_until_s = frame, frame.time_s + (frame.duration_s or frame_s)
    if span.end_s is not None:
        shown_until_s = min(shown_until_s, span.end_s)
    while before is not None and span.start_s + i / fps < shown_until_s - CLOCK_S:
        yield before
        i += 1


def _is_nearest(before: Frame, after: Frame, time_s: float) -> bool:
    """Return True if `before` is nearest, or both are equally near within the precision of times."""
    tie_s = min(CLOCK_S, (after.time_s - before.time_s) / 4)
    return time_s - before.time_s <= after.time_s - time_s + tie_s
