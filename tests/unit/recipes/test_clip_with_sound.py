"""A clip with sound is one MP4 file with the sampled frames and the sampled sound."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
import torch

from lightning_cp.errors import MediaError
from lightning_cp.pipelines import ClipWithSound
from lightning_cp.recipes.sampling.album import Album
from lightning_cp.recipes.sampling.media import write_sample

RATE = 24000


def _clip(channels: int) -> ClipWithSound:
    """Half a second: frames that become brighter, and a tone for each channel."""
    frames = torch.linspace(0, 1, 8).view(8, 1, 1, 1).expand(8, 33, 48, 3)
    times = torch.arange(RATE // 2) / RATE
    sound = torch.stack([0.5 * torch.sin(2 * torch.pi * 440 * (i + 1) * times) for i in range(channels)])
    return ClipWithSound(frames, sound if channels > 1 else sound[0], RATE)


@pytest.mark.parametrize("channels", [1, 2])
def test_picture_and_sound_are_in_the_file(tmp_path: Path, channels: int) -> None:
    given = _clip(channels)
    path = write_sample(given, tmp_path / "clip", fps=16)
    assert path.name == "clip.mp4"
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert container.streams.video[0].average_rate == 16
    with av.open(str(path)) as container:
        assert container.streams.audio[0].sample_rate == RATE
        heard = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=-1)
    assert len(frames) == 8
    assert frames[0].shape == (34, 48, 3)
    means = [frame.mean() / 255 for frame in frames]
    assert np.allclose(means, np.linspace(0, 1, 8), atol=0.03)
    expected = np.atleast_2d(given.sound.numpy())
    assert heard.shape[0] == channels
    for one, other in zip(heard, expected):
        count = min(len(one), len(other))
        spectrum = np.abs(np.fft.rfft(one[:count])), np.abs(np.fft.rfft(other[:count]))
        assert abs(int(spectrum[0].argmax()) - int(spectrum[1].argmax())) <= 1
        assert 0.8 < spectrum[0].max() / spectrum[1].max() < 1.2


def test_other_formats_say_where_the_sound_is(tmp_path: Path) -> None:
    album = Album(tmp_path, format="gif")
    assert album.add(3, _clip(2)).name == "0003.gif"
    assert (tmp_path / "0003.wav").is_file()
    assert album.thumbnails[3].shape[0] == 3
    with pytest.raises(MediaError, match="format=png holds one picture"):
        write_sample(_clip(1), tmp_path / "clip", format="png")
