"""Tiny pipelines in float64 for tests of PipeFusion: a pipeline by name, its latents, and the error of latents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.pipelines import names, table

PIPES = {name: family for family in names() for name in table(family)}
STEPS = 4


def make_pipe(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A pipeline with the same weights on every rank."""
    torch.manual_seed(0)
    pipe = table(PIPES[name])[name].make()
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.to(dtype)
    return pipe


def latents_of(pipe: Any, name: str, **others: Any) -> Tensor:
    """The latents that the pipeline makes; `others` are arguments of its call."""
    tiny = table(PIPES[name])[name]
    inputs = {**tiny.inputs(), "num_inference_steps": STEPS, **others}
    if "pyramid_num_inference_steps_list" in inputs:  # steps of each resolution
        inputs["pyramid_num_inference_steps_list"] = [inputs.pop("num_inference_steps")] * 3
    value = getattr(pipe(**inputs, generator=torch.Generator().manual_seed(7)), tiny.output)
    return torch.as_tensor(value if isinstance(value, Tensor) else value[-1])


def error_of(expected: Tensor, found: Tensor) -> float:
    """The largest relative error."""
    return float((found - expected).abs().max() / expected.abs().max())
