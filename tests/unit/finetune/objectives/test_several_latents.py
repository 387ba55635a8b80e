"""Families with several latents, outputs, and texts: each latent has its own noise and loss, and losses are added."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp.errors import FamilyError
from lightning_cp.families import InputOptions, Sample, Stored, StoredBatch, TextStorage, collate
from lightning_cp.finetune.families.latents import Latents
from lightning_cp.objectives import FlowMatching
from tests.unit.finetune.objectives.test_objectives import Clips

SAMPLES, STEP = 3, 4


class ClipAndSound(Clips):
    """A clip [1, 2, 4] and its sound [5], which some samples do not have."""

    outputs = 2

    def clean(self, stored: Stored, noise: Any = None) -> Any:
        return {"video": stored["video"], "sound": stored["sound"]}

    def inputs(self, noisy: Any, times: Tensor, stored: Stored, options: InputOptions) -> dict[str, Any]:
        return {"hidden_states": noisy["video"], "audio_hidden_states": noisy["sound"], "timestep": times}

    def prediction(self, output: Any, noisy: Any) -> Any:
        video, sound = output
        return {"video": video, "sound": -sound}

    def given_mask(self, stored: Stored, clean: Any) -> Latents | None:
        return {"sound": ~stored["has_sound"].view(-1, 1).expand_as(clean["sound"])}


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, hidden_states: Tensor, audio_hidden_states: Tensor, timestep: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.append(len(timestep))
        return 0.5 * hidden_states, 0.25 * audio_hidden_states


def batch() -> StoredBatch:
    drawn = torch.Generator().manual_seed(0)
    return StoredBatch(
        {
            "video": torch.randn(SAMPLES, 1, 2, 4, generator=drawn),
            "sound": torch.randn(SAMPLES, 5, generator=drawn),
            "has_sound": torch.tensor([True, False, True]),
        }
    )


def expected(stored: StoredBatch) -> Tensor:
    """The losses, computed here from what `noised` gives."""
    noised = FlowMatching(seed=0).noised(ClipAndSound(), stored, step=STEP)
    assert isinstance(noised.noisy, dict)
    assert isinstance(noised.target, dict)
    video = (0.5 * noised.noisy["video"] - noised.target["video"]).square().flatten(1).mean(dim=1)
    sound = (-0.25 * noised.noisy["sound"] - noised.target["sound"]).square().mean(dim=1)
    return video + torch.where(stored["has_sound"], sound, 0.0)


def test_losses_are_added_and_given_latents_have_none() -> None:
    losses = FlowMatching(seed=0).sample_losses(Halves(), ClipAndSound(), batch(), step=STEP, first_index=0)
    assert torch.allclose(losses, expected(batch()))
    noised = FlowMatching(seed=0).noised(ClipAndSound(), batch(), step=STEP)
    assert isinstance(noised.noisy, dict)
    assert torch.equal(noised.noisy["sound"][1], batch()["sound"][1]), "it enters as it is"


def test_each_latent_has_noise_of_its_own_and_one_time() -> None:
    stored = batch()
    stored.tensors["sound"] = torch.zeros(SAMPLES, 8)
    stored.tensors["video"] = torch.zeros(SAMPLES, 1, 2, 4)
    noised = FlowMatching(seed=0).noised(ClipAndSound(), stored, step=STEP)
    assert isinstance(noised.target, dict)
    assert isinstance(noised.noisy, dict)
    assert not torch.allclose(noised.target["video"].flatten(1), noised.target["sound"])
    sigma = noised.times.view(-1, 1)
    heard = stored["has_sound"]
    assert torch.allclose(noised.noisy["sound"][heard], (sigma * noised.target["sound"])[heard])


def test_the_noise_of_a_single_latent_does_not_depend_on_the_form() -> None:
    """A run with a dict of one tensor continues one with a tensor."""
    stored = batch()

    class InDict(Clips):
        def clean(self, stored: Stored, noise: Any = None) -> Any:
            return {"video": stored["video"]}

    class Alone(Clips):
        def clean(self, stored: Stored, noise: Any = None) -> Tensor:
            return stored["video"]

    in_dict = FlowMatching(seed=0).noised(InDict(), stored, step=STEP)
    alone = FlowMatching(seed=0).noised(Alone(), stored, step=STEP)
    assert isinstance(in_dict.noisy, dict)
    assert isinstance(alone.noisy, Tensor)
    assert torch.equal(in_dict.noisy["video"], alone.noisy)


def test_samples_that_cannot_share_a_call_have_one_each() -> None:
    class Single(ClipAndSound):
        one_per_call = True

    transformer = Halves()
    losses = FlowMatching(seed=0).sample_losses(transformer, Single(), batch(), step=STEP, first_index=0)
    assert transformer.calls == [1] * SAMPLES
    assert torch.allclose(losses, expected(batch()))


def test_latents_and_loss_can_be_float64() -> None:
    objective = FlowMatching(seed=0, loss_dtype=torch.float64)
    noised = objective.noised(ClipAndSound(), batch(), step=STEP)
    assert isinstance(noised.target, dict)
    assert noised.target["sound"].dtype == torch.float64
    losses = objective.sample_losses(Halves(), ClipAndSound(), batch(), step=STEP, first_index=0)
    assert losses.dtype == torch.float64
    assert torch.allclose(losses.float(), expected(batch()))


TEXT = TextStorage(
    "masked", 8, others=("pooled",), more=(TextStorage("zeros", 4, sequences=("glyphs",), mask="glyph_mask"),)
)
LAYERS = TextStorage(
    "masked", 8, sequences=("layers",), more=(TextStorage("masked", 4, sequences=("glyphs",), mask="m"),)
)


def sample(text: TextStorage, length: int, glyphs: int) -> Sample:
    stored = {
        "prompt_embeds": torch.ones(length, 2),
        "pooled": torch.ones(3),
        "glyphs": torch.ones(glyphs, 2),
        "layers": torch.ones(length, 5, 2),
    }
    return {name: stored[name] for name in text.names}


def test_each_text_has_its_own_form_length_and_mask() -> None:
    joined = collate([sample(TEXT, 3, 1), sample(TEXT, 5, 2)], TEXT, sample(TEXT, 1, 0))
    assert joined["prompt_embeds"].shape == (2, 5, 2)
    assert joined["prompt_mask"].sum(dim=1).tolist() == [3, 5]
    assert joined["glyphs"].shape == (2, 4, 2)
    assert joined["glyphs"].sum(dim=(1, 2)).tolist() == [2, 4]
    dropped = joined.without_text(torch.tensor([True, False]), TEXT)
    assert dropped["prompt_mask"].sum(dim=1).tolist() == [1, 5]
    assert dropped["glyphs"].sum(dim=(1, 2)).tolist() == [0, 4]


def test_text_of_any_rank_is_padded_along_its_positions() -> None:
    joined = collate([sample(LAYERS, 3, 1), sample(LAYERS, 5, 2)], LAYERS, sample(LAYERS, 1, 0))
    assert joined["layers"].shape == (2, 5, 5, 2)
    assert joined["layers"][0, 3:].abs().sum() == 0
    assert joined["prompt_mask"].sum(dim=1).tolist() == [3, 5]
    assert joined["m"].sum(dim=1).tolist() == [1, 2]
    assert joined.without_text(torch.tensor([False, True]), LAYERS)["m"].sum(dim=1).tolist() == [1, 0]


def test_a_text_that_is_too_long_is_named() -> None:
    with pytest.raises(FamilyError, match="glyphs has 5 positions, more than the 4 of this family"):
        collate([sample(TEXT, 3, 5)], TEXT)
