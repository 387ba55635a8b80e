"""The sound of a clip is its part of the track, at another rate, in two channels, silent where the track has none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_cp.errors import MediaError
from lightning_cp.finetune.media import limits
from lightning_cp.finetune.media.videos import read_sound
from lightning_cp.media import Bucket, Source, load_media
from tests.unit.finetune.media.encode import grey_frames, noise, write_clip, write_video

RATE = 16_000


def test_a_part_of_the_track_is_read_at_its_own_rate(tmp_path: Path) -> None:
    sound = noise(2, RATE)
    file = write_clip(tmp_path / "a.mkv", sound)
    whole = read_sound(file, rate=RATE, start_s=0.0, duration_s=1.0)
    assert whole is not None
    assert torch.allclose(whole, torch.from_numpy(sound), atol=1e-4)
    part = read_sound(file, rate=RATE, start_s=0.25, duration_s=0.5)
    assert part is not None
    assert torch.equal(part, whole[:, RATE // 4 : 3 * RATE // 4])


def test_mono_is_put_on_both_channels_and_ends_in_silence(tmp_path: Path) -> None:
    sound = noise(1, RATE // 2)
    found = read_sound(write_clip(tmp_path / "a.mkv", sound), rate=RATE, start_s=0.0, duration_s=1.0)
    assert found is not None
    assert found.shape == (2, RATE)
    assert torch.equal(found[0], found[1])
    assert float(found[:, : RATE // 2].abs().max()) > 0.1
    assert not found[:, RATE // 2 :].any()


def test_a_track_that_begins_later_stays_in_time(tmp_path: Path) -> None:
    sound = noise(2, RATE // 2)
    found = read_sound(write_clip(tmp_path / "a.mkv", sound, delay_s=0.25), rate=RATE, start_s=0.0, duration_s=1.0)
    assert found is not None
    assert not found[:, : RATE // 4 - 16].any()
    assert torch.allclose(found[:, RATE // 4 : RATE // 2], torch.from_numpy(sound[:, : RATE // 4]), atol=1e-4)


def test_the_rate_is_changed(tmp_path: Path) -> None:
    times = np.arange(48_000, dtype=np.float32) / 48_000
    sine = np.sin(2 * np.pi * 440 * times, dtype=np.float32)
    file = write_clip(tmp_path / "a.mkv", np.stack([0.5 * sine, -0.5 * sine]), rate=48_000)
    found = read_sound(file, rate=RATE, start_s=0.0, duration_s=1.0)
    assert found is not None
    expected = 0.5 * torch.from_numpy(sine[::3].copy())
    inside = slice(200, RATE - 200)
    assert torch.allclose(found[0, inside], expected[inside], atol=2e-3)
    assert torch.allclose(found[1, inside], -expected[inside], atol=2e-3)


def test_a_video_without_a_track_has_no_sound(tmp_path: Path) -> None:
    video = write_video(tmp_path / "a.mp4", grey_frames(8))
    assert read_sound(video, rate=RATE, start_s=0.0, duration_s=0.2) is None


def test_clips_are_loaded_with_the_sound_of_their_frames(tmp_path: Path) -> None:
    source = Source("a", write_clip(tmp_path / "a.mkv", noise(2, RATE)), ("x",), start_s=0.25)
    bucket = [Bucket(5, 48, 64)]
    loaded = load_media(source, bucket, fps=12, sound_rate=RATE)
    expected = read_sound(source.file, rate=RATE, start_s=0.25, duration_s=5 / 12)
    assert loaded.sound is not None
    assert expected is not None
    assert torch.equal(loaded.sound, expected)
    assert load_media(source, bucket, fps=12).sound is None


def test_too_long_sound_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="s of sound are more than the limit"):
        read_sound(tmp_path / "none.mp4", rate=RATE, start_s=0.0, duration_s=limits.SOUND_SAMPLES / RATE + 1)
