"""Attention processors of `set_default_attn_processor`: outputs and gradients of one process, before and after set-up.

PixArt's is diffusers' `AttnProcessor`, which computes all scores as a tensor and makes no attention call.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor
from torch import nn

from lightning_cp import ContextParallelConfig, apply_context_parallel, remove_context_parallel
from lightning_cp.errors import PlanError
from tests.dist.compare import averaged, outcome, worst
from tests.harness import RankPool
from tests.models import TINY
from tests.models.modes import MODES
from tests.reference import max_error


def _set_default(model: Any) -> None:
    """Set the default processors, in classes without such a method by the blocks."""
    if hasattr(model, "set_default_attn_processor"):
        model.set_default_attn_processor()
    else:
        for block in model.transformer_blocks:
            block.attn1.set_processor(AttnProcessor())


def _processors(model: nn.Module) -> list[Any]:
    return [module.processor for module in model.modules() if getattr(module, "processor", None) is not None]


def _errors(rank: int, world: int, name: str, mode: str) -> list[float]:
    """Errors of outputs and gradients: processors set before and after set-up, and of a deep copy."""
    arguments, found = TINY[name].arguments(), []
    single, before, after = (TINY[name].build() for _ in range(3))
    for model in (single, before):
        _set_default(model)
    expected, alone = outcome(single, arguments)
    own = _processors(before)
    for model in (before, after):
        apply_context_parallel(model, MODES[mode](world))
    outcome(after, arguments)
    after.zero_grad()
    _set_default(after)
    for model in (before, after, copy.deepcopy(after)):
        model.zero_grad()
        out, gradients = outcome(model, arguments)
        found += [max_error(out, expected), worst(averaged(gradients, world), alone)]
    remove_context_parallel(before)
    assert all(a is b for a, b in zip(_processors(before), own, strict=True))
    return found


_CASES = [("pixart", "ring", 3), ("pixart", "unified", 4), ("dit", "rotation", 3), ("hunyuan_dit", "ulysses", 2)]
_CASES += [("stable_audio", "ring", 3)]


@pytest.mark.parametrize(("name", "mode", "world"), _CASES)
@pytest.mark.default(1)
def test_default_processors_are_followed(run_ranks: RankPool, name: str, mode: str, world: int) -> None:
    for errors in run_ranks(world, _errors, name, mode):
        assert max(errors) < 1e-9


def test_a_processor_that_cannot_be_followed_is_refused_with_a_remedy() -> None:
    """`AttnProcessor` multiplies by the scale of the module, and `AttnProcessor2_0` does not."""
    model: Any = TINY["pixart"].build()
    model.set_default_attn_processor()
    model.transformer_blocks[1].attn1.scale = 1.0
    with pytest.raises(PlanError, match=r"transformer_blocks.1.attn1.processor is a AttnProcessor.*AttnProcessor2_0"):
        apply_context_parallel(model, ContextParallelConfig())
    model.transformer_blocks[1].attn1.scale = model.transformer_blocks[0].attn1.scale
    apply_context_parallel(model, ContextParallelConfig())
    with torch.no_grad():
        model(**TINY["pixart"].arguments())
