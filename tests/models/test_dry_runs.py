"""Every class can be planned: a step of training and one of sampling are dry-run on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as replace_fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp.nest import replace
from lightning_cp.planning.degrees import planned
from lightning_cp.planning.dry_run import dry_run
from lightning_cp.planning.models import MediaSize, diffusers_model
from lightning_cp.planning.recording import StepSettings
from lightning_cp.planning.step import Layout
from lightning_cp.plans.examples import EXAMPLES
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


def _check(build: Callable[[], nn.Module], inputs: dict[str, Any], layout: Layout, task: str, name: str) -> None:
    settings = StepSettings(task)  # type: ignore[arg-type]
    if name in CANNOT or (task == "train" and name in CANNOT_TRAIN):
        with pytest.raises(ValueError, match="this forward cannot be traced"):
            dry_run(build, inputs, layout, settings, dtype=torch.float32)
    else:
        assert dry_run(build, inputs, layout, settings, dtype=torch.float32).flops > 0, name


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning", "ignore:In CPU autocast:UserWarning")
@pytest.mark.parametrize("kind", [*EXAMPLES, "ZImageControlNetModel"])
@pytest.mark.default("Kandinsky5Transformer3DModel")  # it reads values of positions
def test_every_class_can_be_planned(kind: str) -> None:
    """Sampling with the planner's inputs, training with those of `tests/models`, or the forward cannot be traced."""
    if kind in EXAMPLES:
        _check_example(kind)
    for name in (FIRST[kind], *(x for x in (*CANNOT, *CANNOT_TRAIN) if TINY[x].kind == kind and x != FIRST[kind])):
        inputs: dict[str, Any] = replace(
            Tensor, lambda x: x.float() if x.is_floating_point() else x, TINY[name].arguments()
        )
        model = planned(TINY[name].build().float(), inputs)
        for task in ("train", "sample") if name in CANNOT_TRAIN else ("train",):
            _check(model.build, inputs, Layout(ulysses=2), task, name)


def _check_example(kind: str) -> None:
    """Values of the same inputs are those of `tests/models`."""
    name, example = FIRST[kind], EXAMPLES[kind]
    frames = 1 + 2 * example.time if example.has("frames", "audio") else 1
    side = 8 * example.space if name == "kandinsky6_sr" else 4 * example.space  # it has blocks of 8 x 8 tokens
    size = MediaSize(2 * side, side, frames, text=7, batch=2)  # an odd number of tokens, text included
    config = TINY[name].config
    model = diffusers_model(kind, config, size)
    _check(model.build, model.inputs, Layout(ring=2), "sample", name)
    if example.has("height", "tokens"):
        with pytest.raises(ValueError, match=r"height=.* must be a multiple"):
            diffusers_model(kind, config, replace_fields(size, height=size.height + 1))
    try:  # six classes have no default configuration: they need entries such as their widths
        default = diffusers_model(kind, {}, MediaSize(768, 1536, frames if example.has("frames") else 1))
    except ValueError as error:
        assert "cannot be built with this configuration" in str(error)  # noqa: PT017
    else:
        assert default.tokens


def test_exceptions_are_models() -> None:
    assert {*CANNOT, *CANNOT_TRAIN} <= set(TINY)
