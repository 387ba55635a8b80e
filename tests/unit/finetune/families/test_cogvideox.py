"""CogVideoX without weights: schedules, extra frames, sizes and positions."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import CogVideoXDDIMScheduler, FlowMatchEulerDiscreteScheduler

from lightning_cp.errors import FamilyError
from lightning_cp.families import StoredBatch, load_family
from lightning_cp.finetune.families.schedule import diffusion_facts
from lightning_cp.finetune.families.video.cogvideox import _centred

FACTS: dict[str, Any] = {
    "spatial": 8,
    "temporal": 4,
    "scaling_factor": 0.5,
    "patch": 2,
    "patch_t": 2,
    "text_length": 226,
    "sample_size": [6, 10],
    "learned_positions": False,
    "rotary_dim": 16,
    "schedule": {"prediction": "v_prediction", "alphas_cumprod": [0.9, 0.1]},
}


def test_the_schedule_is_that_of_the_scheduler_with_zero_terminal_snr() -> None:
    scheduler = CogVideoXDDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True, snr_shift_scale=1.0)
    facts = json.loads(json.dumps(diffusion_facts(scheduler)))
    assert facts["prediction"] == "v_prediction"
    assert len(facts["alphas_cumprod"]) == 1000
    assert facts["alphas_cumprod"][-1] == 0
    assert torch.equal(torch.tensor(facts["alphas_cumprod"], dtype=torch.float64), scheduler.alphas_cumprod)


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (CogVideoXDDIMScheduler(prediction_type="sample"), "prediction_type='sample' must be 'v_prediction' or 'eps"),
        (FlowMatchEulerDiscreteScheduler(), "FlowMatchEulerDiscreteScheduler: prediction_type=None must be"),
        (SimpleNamespace(config={"prediction_type": "epsilon"}), "SimpleNamespace has no alphas_cumprod"),
    ],
)
def test_schedulers_without_such_a_schedule_are_refused(scheduler: Any, message: str) -> None:
    with pytest.raises(FamilyError, match=message):
        diffusion_facts(scheduler)


def test_x0_begins_with_a_copy_of_the_first_frame_where_the_number_of_frames_is_odd() -> None:
    family = load_family("cogvideox", FACTS)
    latents = torch.arange(3.0).view(1, 1, 3, 1, 1).expand(1, 4, 3, 2, 2)
    stored = StoredBatch({"latents": latents, "latents_std": torch.ones(1, 4, 3, 2, 2)})
    assert family.clean(stored)[0, :, 0, 0, 0].tolist() == [0, 0, 0.5, 1]
    noise = torch.tensor([100.0, 1, 2, 3]).view(1, 4, 1, 1, 1).expand(1, 4, 4, 2, 2)
    assert family.clean(stored, noise)[0, :, 0, 0, 0].tolist() == [0.5, 0.5, 1.5, 2.5]
    assert load_family("cogvideox", {**FACTS, "patch_t": None}).clean(stored).shape[1] == 3


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, r"height=64, width=80 must be at most \(48, 80\): there are no positions above"),
        ({"learned_positions": True}, r"height=64, width=80 must be \(48, 80\): the learned positions have this size"),
    ],
)
def test_sizes_without_positions_are_refused(facts: dict[str, Any], message: str) -> None:
    family = load_family("cogvideox", {**FACTS, **facts})
    with pytest.raises(FamilyError, match=message):
        family.encode_media(None, {"pixels": torch.zeros(1, 3, 9, 64, 80)})


def test_positions_are_centred_as_in_the_pipeline() -> None:
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

    for height in range(1, 40, 3):
        for width in range(1, 50, 3):
            for base in ((30, 45), (3, 5), (17, 8)):
                expected = get_resize_crop_region_for_grid((height, width), base[1], base[0])
                assert _centred((height, width), base) == expected
