"""Read the sound of a clip."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_cp.errors import MediaError
from lightning_cp.finetune.media import limits
from lightning_cp.finetune.media.decoder import open_video, require_pyav
from lightning_cp.finetune.media.failures import failures_of

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
