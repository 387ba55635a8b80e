"""A tiny pipeline of diffusers for tests: how it is made, and what it is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn


@dataclass(frozen=True)
class TinyPipe:
    """One pipeline with random weights.

    Attributes:
        make: gives the pipeline, from torch's random state (its weights are equal on all ranks).
        inputs: gives the keyword arguments of a call, without `generator`. Its own random numbers are seeded.
        guidance: computation of the guidance branches: "batch": in one call of the transformer, "calls": in
            several, "none": it has one branch.
        transformers: names of the transformers that run parallel.
        controlnets: names of the ControlNets that run parallel.
        output: name of the field of the result that is compared.
    """

    make: Callable[[], Any]
    inputs: Callable[[], dict[str, Any]]
    guidance: Literal["batch", "calls", "none"]
    transformers: tuple[str, ...] = ("transformer",)
    output: str = "images"
    controlnets: tuple[str, ...] = ()


def no_zeros(module: nn.Module, scale: float = 0.05) -> nn.Module:
    """Fills parameters that are all zero with noise, so that nothing that is computed is multiplied by nothing."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.normal_(std=scale)
    return module
