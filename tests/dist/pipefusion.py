"""Tiny pipelines in float64 for tests of PipeFusion: a pipeline by name, and its latents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.pipelines import PIPES

STEPS = 4


def make_pipe(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A pipeline with the same weights on every rank."""
    return PIPES[name].pipe(dtype)


def latents_of(pipe: Any, name: str, **others: Any) -> Tensor:
    """The latents that the pipeline makes; `others` are arguments of its call."""
    changed = {"num_inference_steps": STEPS, **others}
    if "pyramid_num_inference_steps_list" in PIPES[name].call:  # steps of each resolution
        changed["pyramid_num_inference_steps_list"] = [changed.pop("num_inference_steps")] * 3
    return PIPES[name].draw(pipe, **changed)
