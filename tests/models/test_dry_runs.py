"""Every tiny model can be planned: a step of training and one of sampling are dry-run on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cp.nest import replace
from lightning_cp.planning.degrees import planned
from lightning_cp.planning.dry_run import dry_run
from lightning_cp.planning.recording import StepSettings
from lightning_cp.planning.step import Layout
from tests.harness.cases import in_turn
from tests.models import FIRST, TINY

# Models that cannot be traced, with what their forward does with the values of a tensor that it computes.
_EXPERTS = "counts the tokens of each expert"
_SELECTS = "selects tokens with a mask, so that their number depends on it"
CANNOT = {
    "glm_image": "selects samples with a mask",
    "glm_image_unmasked": "selects samples with a mask",
    "hidream": _EXPERTS,
    "hidream_training": _EXPERTS,
    "hidream_short_text": _EXPERTS,
    "hidream_tokens": _EXPERTS,
    "hunyuan_image": _SELECTS,
    "hunyuan_video15": _SELECTS,
    "hunyuan_video15_text_to_video": _SELECTS,
    "joyimage_items": "reads the largest position",
    "kandinsky6_sr": "computes a sparse mask from the queries and keys",
    "ltx2_cross_timestep": "reads whether all samples are perturbed",
    "nucleus_moe": _EXPERTS,
    "nucleus_moe_short_text": _EXPERTS,
    "qwen_image21": "repeats rows by numbers that it computes",
    "qwen_image21_no_condition": "repeats rows by numbers that it computes",
}
# Models that can only be planned for sampling, with what their backward does.
CANNOT_TRAIN = {
    "control_z_image": "selects the gradients of padding tokens with a mask",
    "control_z_image_unrefined": "selects the gradients of padding tokens with a mask",
}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("name", "layout"),
    in_turn(
        list(dict.fromkeys((*list(FIRST.values())[::3], *CANNOT, *CANNOT_TRAIN))), (Layout(ring=2), Layout(ulysses=2))
    ),
)
def test_a_model_can_be_planned(name: str, layout: Layout) -> None:
    tiny = TINY[name]
    inputs: dict[str, Any] = replace(Tensor, lambda x: x.float() if x.is_floating_point() else x, tiny.arguments())
    model = planned(tiny.build().float(), inputs)
    for task in ("train", "sample"):
        settings = StepSettings(task)  # type: ignore[arg-type]
        if name in CANNOT or (task == "train" and name in CANNOT_TRAIN):
            with pytest.raises(ValueError, match="this forward cannot be traced"):
                dry_run(model.build, inputs, layout, settings, dtype=torch.float32)
        else:
            assert dry_run(model.build, inputs, layout, settings, dtype=torch.float32).flops > 0


def test_exceptions_are_models() -> None:
    assert {*CANNOT, *CANNOT_TRAIN} <= set(TINY)
