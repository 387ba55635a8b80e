"""Sound of LTX-2: its spectrogram, clips without sound, and a loss that leaves them out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_cp.errors import FamilyError
from lightning_cp.families import collate, family_for
from lightning_cp.family_check import store
from lightning_cp.finetune.families.video.ltx import LTX
from lightning_cp.finetune.families.video.sound import log_mel
from lightning_cp.objectives import objective_for
from tests.families.cases import CAPTIONS, made, media

pytestmark = pytest.mark.filterwarnings("ignore")
RATE, HOP, BINS = 16_000, 160, 64


def test_the_spectrogram_is_that_of_transformers() -> None:
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    sound = np.random.default_rng(0).standard_normal(5000)
    filters = mel_filter_bank(513, BINS, 0.0, 8000.0, RATE, norm="slaney", mel_scale="slaney")
    settings: dict[str, Any] = {"frame_length": 1024, "hop_length": HOP, "power": 1.0, "mel_filters": filters}
    expected = spectrogram(sound, window_function(1024, "hann"), **settings, mel_floor=1e-5, log_mel="log")
    found = log_mel(torch.from_numpy(sound).view(1, 1, -1), rate=RATE, hop=HOP, bins=BINS)
    assert found.shape == (1, 1, 5000 // HOP + 1, BINS)
    assert np.allclose(found[0, 0].numpy(), expected.T, atol=1e-3)


def test_a_tone_is_in_the_bin_of_its_frequency() -> None:
    times = torch.arange(RATE) / RATE
    sound = torch.stack([torch.sin(2 * torch.pi * 1000 * times), torch.zeros(RATE)])
    tone, silence = log_mel(sound[None], rate=RATE, hop=HOP, bins=BINS)[0]
    # Slaney's scale has 15 mel at 1 kHz and 15 + 27 · log(8) / log(6.4) at 8 kHz, so 65 steps end in bin 21
    assert set(tone[4:-4].argmax(dim=-1).tolist()) == {21}
    assert torch.equal(silence, torch.full_like(silence, 1e-5).log())


def test_very_short_sound_has_a_spectrum() -> None:
    assert log_mel(torch.ones(1, 2, 100), rate=RATE, hop=HOP, bins=BINS).shape == (1, 2, 1, BINS)


@pytest.mark.parametrize("silent", [None, 0.0, 5e-5])
def test_clips_without_sound_have_the_loss_of_their_frames_only(silent: float | None) -> None:
    pipe, given = made("ltx2"), dict(media("ltx2"))
    family, objective = family_for(pipe), objective_for(family_for(pipe), seed=0)
    losses = []
    for scale in (1.0, silent):
        changed = given if scale is None else {**given, "sound": given["sound"] * scale}
        changed = {name: x for name, x in changed.items() if scale is not None or name != "sound"}
        stored = collate(store(family, pipe, CAPTIONS, changed), family.text)
        assert stored["sound_loss_mask"].flatten().tolist() == [float(scale == 1.0)] * 2
        noised = objective.noised(family, stored, step=0)
        assert noised.noisy["sound"].shape == stored["sound"].shape, "the stream is fed"
        assert not torch.equal(noised.noisy["sound"], family.clean(stored)["sound"]), "with noise"
        with torch.no_grad():
            losses.append(objective.sample_losses(pipe.transformer, family, stored, step=0))
        if scale != 1.0:
            video = {"loss_mask": torch.zeros(2, 1, 1, 1, 1)}
            only_video = collate(store(family, pipe, CAPTIONS, changed), family.text)
            only_video.tensors.update(video)
            with torch.no_grad():
                assert not objective.sample_losses(pipe.transformer, family, only_video, step=0).any()
    assert bool((losses[0] > losses[1]).all())
    assert bool((losses[1] > 0).all())


def test_the_sound_of_one_sample_does_not_change_the_others() -> None:
    pipe, given = made("ltx2"), media("ltx2")
    family = family_for(pipe)
    silenced = {**given, "sound": given["sound"] * torch.tensor([1.0, 0.0]).view(2, 1, 1)}
    samples = family.encode_media(pipe, silenced)
    assert [float(x["sound_loss_mask"]) for x in samples] == [1.0, 0.0]
    assert torch.equal(samples[0]["sound"], family.encode_media(pipe, given)[0]["sound"])
    assert samples[0]["sound"].shape[1] == round(17 / 25 * 25)


def test_a_first_frame_needs_a_second_latent_frame() -> None:
    with pytest.raises(FamilyError, match="clips must have more than one latent frame"):
        family_for(made("ltx_image")).check_size(height=64, width=96, frames=1)


def test_patches_of_several_latents_are_refused() -> None:
    config = SimpleNamespace(patch_size=2, patch_size_t=1)
    pipe = SimpleNamespace(transformer=SimpleNamespace(config=config), vae=None)
    with pytest.raises(FamilyError, match="one latent in a token, but the transformer has patch_size=2"):
        LTX.read_facts(pipe)
