"""A pipeline's result has one sample per prompt, with its sound if it is asked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from diffusers.pipelines.ltx2.pipeline_output import LTX2PipelineOutput

from lightning_cp.pipelines.prompts import ClipWithSound, samples_of

PIPE = SimpleNamespace(vocoder=SimpleNamespace(config=SimpleNamespace(output_sampling_rate=16000)))
RESULT = LTX2PipelineOutput(frames=torch.rand(2, 3, 4, 4, 3), audio=torch.rand(2, 2, 50))


def test_clips_come_with_their_sound_if_it_is_asked_for() -> None:
    for i, sample in enumerate(samples_of(PIPE, RESULT, 2, sound=True)):
        assert isinstance(sample, ClipWithSound)
        assert torch.equal(sample.frames, RESULT.frames[i])
        assert torch.equal(sample.sound, RESULT.audio[i])
        assert sample.rate_hz == 16000
    assert torch.equal(torch.stack(samples_of(PIPE, RESULT, 2)), RESULT.frames)
    silent = samples_of(SimpleNamespace(), {"images": [1, 2]}, 2, sound=True)
    assert silent == [1, 2]


def test_a_wrong_number_of_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="returned 2 frames for 3 prompts"):
        samples_of(PIPE, RESULT, 3)
