"""Write small videos with known frames."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

STEP = 4  # grey levels from one frame to the next


def grey_frames(count: int, height: int = 48, width: int = 64) -> list[NDArray[np.uint8]]:
    """Frames; their grey level is their number."""
    return [np.full((height, width, 3), STEP * i % 256, np.uint8) for i in range(count)]


def numbers(clip: Tensor) -> list[int]:
    """Numbers of `grey_frames`. Args: clip: uint8 [3, f, h, w]."""
    return [round(float(frame) / STEP) for frame in clip.float().mean(dim=(0, 2, 3))]


def write_video(
    file: Path,
    frames: Sequence[NDArray[np.uint8]],
    *,
    codec: str = "libx264",
    rate: Fraction | int = 24,
    times_ms: Sequence[int] | None = None,
    options: dict[str, str] | None = None,
    pixel_format: str = "yuv420p",
    rotation: dict[str, Any] | None = None,
    pixel_aspect: Fraction | None = None,
) -> Path:
    """Encode RGB frames. Args: times_ms: presentation times of a variable rate, in milliseconds."""
    with av.open(str(file), "w") as container:
        stream = container.add_stream(codec, rate=rate, options={"crf": "4", **(options or {})})
        stream.height, stream.width, _ = frames[0].shape
        stream.pix_fmt = pixel_format
        if times_ms:
            stream.codec_context.time_base = Fraction(1, 1000)
        if rotation:
            stream.set_display_rotation(**rotation)
        if pixel_aspect:
            stream.codec_context.sample_aspect_ratio = pixel_aspect
        for i, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, "rgb24").reformat(format=pixel_format)
            frame.pts = times_ms[i] if times_ms else i
            frame.time_base = Fraction(1, 1000) if times_ms else 1 / Fraction(rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file


def write_clip(
    file: Path, sound: NDArray[np.float32], *, rate: int = 16_000, delay_s: float = 0.0, frames: int = 24
) -> Path:
    """Write a video of 24 frames per second with a lossless track. Args: sound: [channels, samples]."""
    with av.open(str(file), "w") as container:
        video = container.add_stream("libx264", rate=24, options={"crf": "4"})
        video.height, video.width, video.pix_fmt = 48, 64, "yuv420p"
        layout = "stereo" if len(sound) == 2 else "mono"
        track = container.add_stream("flac", rate=rate, layout=layout, format="s16")
        for i, pixels in enumerate(grey_frames(frames)):
            frame = av.VideoFrame.from_ndarray(pixels, "rgb24").reformat(format="yuv420p")
            frame.pts, frame.time_base = i, Fraction(1, 24)
            container.mux(video.encode(frame))
        container.mux(video.encode())
        values = np.ascontiguousarray((sound.T * 32767).astype(np.int16).reshape(1, -1))
        piece = av.AudioFrame.from_ndarray(values, format="s16", layout=layout)
        piece.sample_rate, piece.pts, piece.time_base = rate, round(delay_s * rate), Fraction(1, rate)
        container.mux(track.encode(piece))
        container.mux(track.encode())
    return file


def noise(channels: int, samples: int) -> NDArray[np.float32]:
    """Sound of noise."""
    return (np.random.default_rng(0).random((channels, samples), np.float32) - 0.5) * 0.9
