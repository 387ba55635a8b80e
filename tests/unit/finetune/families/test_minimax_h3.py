"""MiniMax-H3: a time for the clip and one for its sound, texts of any length, and clips that it does not take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cp.errors import FamilyError
from lightning_cp.families import Family, InputOptions, StoredBatch, collate, family_for
from lightning_cp.family_check import store
from lightning_cp.objectives import FlowMatching, Uniform, objective_for
from tests.families.cases import CAPTIONS, made

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def family() -> Family:
    return family_for(made("minimax_h3"))


@pytest.fixture(scope="module")
def stored(family: Family) -> StoredBatch:
    """Two short clips with sound, and texts of different lengths."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(2, 3, 22, 16, 32, generator=generator) * 2 - 1
    sound = torch.rand(2, 2, 8000, generator=generator) - 0.5
    samples = store(family, made("minimax_h3"), CAPTIONS, {"pixels": pixels, "sound": sound})
    return collate(samples, family.text)


def test_both_times_are_those_of_one_step_of_the_pipeline(family: Family) -> None:
    pipe = made("minimax_h3")
    for scheduler in (pipe.scheduler, pipe.audio_scheduler):
        scheduler.set_timesteps(50)
    times: Any = family.latent_times(pipe.scheduler.sigmas.double())
    assert torch.equal(times["video"].float(), pipe.scheduler.sigmas)
    assert torch.allclose(times["sound"].float(), pipe.audio_scheduler.sigmas, rtol=1e-6, atol=0)
    assert (times["video"] - times["sound"]).max() > 0.2


def test_a_clip_and_its_sound_are_noised_at_their_times(family: Family, stored: StoredBatch) -> None:
    objective = FlowMatching(seed=0, density=Uniform(), sample_posterior=False)
    noised, clean = objective.noised(family, stored, step=1), family.clean(stored)
    times: Any = family.latent_times(noised.times)
    assert isinstance(noised.noisy, dict)
    assert isinstance(noised.target, dict)
    for name, x in noised.noisy.items():
        sigma = times[name].view(-1, *[1] * (x.dim() - 1))
        assert torch.allclose(x, clean[name] + sigma * noised.target[name], atol=1e-6), name
    assert len({*times["video"].tolist(), *times["sound"].tolist()}) == 4


@pytest.mark.parametrize("number", [0, 1])
def test_the_transformer_is_given_one_text_without_padding(family: Family, stored: StoredBatch, number: int) -> None:
    sample = stored.samples(number, number + 1)
    noised = objective_for(family, seed=0).noised(family, sample, step=1, first_index=number)
    times: Any = family.latent_times(noised.times)
    given = family.inputs(noised.noisy, times, noised.stored, InputOptions())
    length = int(sample["prompt_mask"].sum()) if "prompt_mask" in sample else sample["prompt_embeds"].shape[1]
    assert given["encoder_hidden_states"].shape[1] == length == len(given["text_indices"])
    assert given["position_ids"][given["video_indices"][0]].tolist()[0] == length  # the clip's time follows the text
    rows = given["timestep"][given["timestep_indices"]]
    assert torch.equal(rows[given["video_indices"]].unique(), (1 - times["video"].double()).float())
    assert torch.equal(rows[given["audio_indices"]].unique(), (1 - times["sound"].double()).float())
    assert given["token_tags"].bincount().tolist() == [len(given[f"{x}_indices"]) for x in ("video", "text", "audio")]


def test_losses_are_weighted_by_their_times(family: Family, stored: StoredBatch) -> None:
    transformer, shape = made("minimax_h3").transformer, (2, 1, 1, 1, 1)
    silent = {"sound_loss_mask": torch.zeros(2, 1, 1, 1)}
    parts = {"sound": {"loss_mask": torch.zeros(shape)}, "video": {"loss_mask": torch.ones(shape), **silent}}

    def losses(part: str, **settings: Any) -> Tensor:
        batch = StoredBatch({**stored.tensors, **parts[part]})
        objective = FlowMatching(seed=0, **settings)
        return objective.sample_losses(transformer, family, batch, step=1, first_index=0)

    times: Any = family.latent_times(FlowMatching(seed=0).noised(family, stored, step=1).times)
    for name in parts:
        weight = torch.minimum((1 - times[name]).square(), 0.5 * times[name].square())
        expected = losses(name) * weight
        assert torch.allclose(losses(name, weighting="min_snr", min_snr_gamma=0.5), expected, rtol=1e-5), name


@pytest.mark.parametrize("frames", [1, 5, 21, 23])
def test_other_numbers_of_frames_are_refused(family: Family, frames: int) -> None:
    with pytest.raises(FamilyError, match=rf"frames={frames} must be 17·n \+ 22"):
        family.check_size(height=16, width=32, frames=frames)
    family.check_size(height=16, width=32, frames=39)


def test_clips_of_another_rate_are_refused(family: Family) -> None:
    media = {"pixels": torch.zeros(1, 3, 22, 16, 32), "fps": torch.tensor([25.0])}
    with pytest.raises(FamilyError, match="has clips of 24 frames per second, got 25: set fps=24"):
        family.encode_media(made("minimax_h3"), media)


def test_the_empty_caption_has_a_text(family: Family) -> None:
    (empty,) = family.encode_text(made("minimax_h3"), [""])
    assert len(empty["prompt_embeds"]) == 1
