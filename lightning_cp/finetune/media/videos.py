"""Read clips of videos, and their sound."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_cp.errors import MediaError
from lightning_cp.finetune.media import limits
from lightning_cp.finetune.media.decoder import (
    CLOCK_S,
    Span,
    choose_frames,
    decode_from,
    open_video,
    pixel_aspect,
    require_pyav,
    to_rgb,
)
from lightning_cp.finetune.media.failures import failures_of


@dataclass(frozen=True)
class VideoInfo:
    """Facts of a video.

    Args:
        width: in pixels as shown: upright, with square pixels.
        height: in pixels as shown.
        fps: frames per second, on average if the rate varies.
        duration_s: duration of the video stream.
        frames: number of frames; None if the file does not store it.
    """

    width: int
    height: int
    fps: float
    duration_s: float
    frames: int | None


class ShortClipError(MediaError):
    """A video with too few frames. Attribute `available`: how many there are."""

    def __init__(self, message: str, available: int) -> None:
        super().__init__(message)
        self.available = available


def probe(file: str | Path) -> VideoInfo:
    """Read size, rate and duration of a video. Decodes one frame.

    Raises: MediaError: PyAV is not installed, or the file is missing, damaged or no video.
    """
    file = Path(file)
    with failures_of(file), open_video(file) as (container, stream):
        with closing(decode_from(file, container, stream, 0.0)) as frames:
            height, width, _ = to_rgb(next(frames).picture, pixel_aspect(stream)).shape
        fps = _rate(stream)
        if stream.duration is not None:
            duration_s = float(stream.duration * stream.time_base)
        else:
            duration_s = (container.duration or 0) / 1e6
        if duration_s <= 0 or fps <= 0 or container.format.name == "mpeg":  # FFmpeg guesses its duration
            fps, duration_s = _measured(file, fps)
        return VideoInfo(width, height, fps, duration_s, stream.frames or None)


def _rate(stream: Any) -> float:
    return float(stream.average_rate or stream.guessed_rate or 0)


def _measured(file: Path, fps: float) -> tuple[float, float]:
    """Return frames per second and duration from the times of all packets, without decoding."""
    with open_video(file) as (container, stream):
        stamps = [packet.dts if packet.pts is None else packet.pts for packet in container.demux(stream) if packet.size]
        times = [float(stamp * stream.time_base) for stamp in stamps if stamp is not None]
    span_s = max(times) - min(times) if times else 0.0
    if fps <= 0 and span_s > 0:
        fps = (len(times) - 1) / span_s
    if fps <= 0:
        raise MediaError("has neither a frame rate nor the times of two frames")
    return fps, span_s + 1 / fps


def resampled_frames(info: VideoInfo, *, fps: float | None, start_s: float = 0.0, end_s: float | None = None) -> int:
    """Return how many frames a clip has after resampling. Args: fps: None: the video's rate."""
    end_s = info.duration_s if end_s is None else min(end_s, info.duration_s)
    return max(0, math.ceil((end_s - start_s - CLOCK_S) * (info.fps if fps is None else fps)))


def _check_size(frames: int, height: int, width: int) -> None:
    if frames * height * width > limits.CLIP_PIXELS:
        raise MediaError(
            f"{frames} frames of {width} x {height} pixels are more than the limit of {limits.CLIP_PIXELS} pixels of a "
            "clip: take fewer frames, or resize the video"
        )


def read_clip(
    file: str | Path, *, frames: int, fps: float | None, start_s: float = 0.0, end_s: float | None = None
) -> Tensor:
    """Read consecutive frames of a video as RGB, upright, with square pixels.

    With `fps`, frame i is the one presented nearest to `start_s + i / fps`, the earlier one if two
    are equally near. Videos with a variable rate keep their speed. The clip ends where the last frame of the video
    is no longer shown.

    Args:
        frames: number of frames.
        fps: frames per second; None: consecutive frames as stored, from the one nearest to `start_s`.
        start_s: start in seconds from the first frame. The decoder starts at the key frame before it.
        end_s: frames from this time on are not used.
    Returns: uint8 [3, frames, h, w], a view of [frames, h, w, 3].
    Raises:
        MediaError: PyAV is not installed, or the file is missing, damaged, no video, HDR, or too short; names the file.
            Damage that the codec cannot detect (most of VP9 and HEVC) is not noticed. Interlaced videos are not
            deinterlaced.
    """
    file = Path(file)
    with failures_of(file):
        if frames < 1 or start_s < 0 or (fps is not None and not fps > 0):
            raise MediaError(f"frames={frames} and fps={fps} must be positive, and start_s={start_s} at least 0")
        with open_video(file) as (container, stream):
            aspect, rate = pixel_aspect(stream), _rate(stream)
            clip, count, last = np.empty(0, np.uint8), 0, None
            with closing(decode_from(file, container, stream, start_s)) as decoded:
                for frame in choose_frames(decoded, Span(start_s, end_s, fps), frame_s=1 / rate if rate else 0.0):
                    pixels = clip[count - 1] if frame is last else to_rgb(frame.picture, aspect)
                    if count == 0:
                        _check_size(frames, *pixels.shape[:2])
                        clip = np.empty((frames, *pixels.shape), np.uint8)
                    clip[count] = pixels
                    count, last = count + 1, frame
                    if count == frames:
                        return torch.from_numpy(clip).permute(3, 0, 1, 2)
        span = f"from {start_s:g} s" + ("" if end_s is None else f" to {end_s:g} s")
        at = f"{rate if fps is None else fps:g} frames per second"
        raise ShortClipError(f"{file}: has {count} frames {span} at {at}, but {frames} are needed", count)


_CHANNELS = 2


def read_sound(file: str | Path, *, rate: int, start_s: float, duration_s: float) -> Tensor | None:
    """Read a part of a video's first audio track as stereo sound. Parts without samples are silent.

    Mono is put on both channels, and more channels are mixed down.

    Args:
        rate: samples per second.
        start_s: start in seconds from the first frame of the video.
        duration_s: in seconds.
    Returns: float32 [2, samples] in [-1, 1]; None if the video has no audio track.
    Raises: MediaError: PyAV is not installed, the track is damaged, or too long for the limit; names the file.
    """
    file, count = Path(file), round(duration_s * rate)
    if count > limits.SOUND_SAMPLES:
        raise MediaError(f"{file}: {duration_s:g} s of sound are more than the limit of {limits.SOUND_SAMPLES} samples")
    with failures_of(file), open_video(file) as (container, video):
        if not container.streams.audio:
            return None
        stream = container.streams.audio[0]
        origin_s = float((video.start_time or 0) * video.time_base) + start_s
        sound = np.zeros((_CHANNELS, count), np.float32)
        for begin_s, samples in _decoded(container, stream, rate):
            first = round((begin_s - origin_s) * rate)
            if first >= count:
                break
            kept = samples[:, max(0, -first) : count - first]
            sound[:, max(0, first) : max(0, first) + kept.shape[1]] = kept
        return torch.from_numpy(sound).clamp_(-1, 1)


def _decoded(container: Any, stream: Any, rate: int) -> Iterator[tuple[float, NDArray[np.float32]]]:
    """Yield pieces of the resampled track with their times in seconds, from the beginning: (time, [2, samples])."""
    resampler = require_pyav().AudioResampler(format="fltp", layout="stereo", rate=rate)
    frames, done = container.decode(stream), 0
    first = next(frames, None)
    if first is None:
        return
    begin_s = float((first.pts or 0) * stream.time_base)
    for frame in chain([first], frames, [None]):  # None: what the resampler still holds
        for piece in resampler.resample(frame):
            samples = piece.to_ndarray().astype(np.float32, copy=False)
            yield begin_s + done / rate, samples
            done += samples.shape[1]
