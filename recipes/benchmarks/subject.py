"""Subjects of a benchmark: the same work done by one process, by this library in each mode, and by other libraries."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_cp.config import ContextParallelConfig
from lightning_cp.engine.apply import parallelize
from lightning_cp.plans.examples import EXAMPLES

ONE_THREAD, ALL_THREADS = "one process, one thread", "one process, all threads"
SINGLE_RANK = "one process"  # on a GPU
UNCHECKED = ", check_peers=off"  # after a mode's name: the same, without comparing arguments between ranks
QUERIES_CALL, HEADS_CALL = "one call: its queries", "one call: its heads"  # a rank's share, nothing sent


@dataclass(frozen=True)
class Subject:
    """One way to do a workload's step.

    Attributes:
        name: row name in the table.
        build: function that returns the step, called on every participating rank. An error replaces the figures.
        rank_zero_only: only rank 0 participates.
        threads: number of CPU threads during the step; 0: unchanged.
        is_peer: belongs to another library.
        steps: number of steps that the built function runs.
        work: share of the work of one process: of the pairs of a query and a key, those that a mask allows.
        imbalance: pairs of the busiest rank relative to the mean, counted in whole blocks; None: no mask.
    """

    name: str
    build: Callable[[], Callable[[], object]]
    rank_zero_only: bool = False
    threads: int = 0
    is_peer: bool = False
    steps: int = 1
    work: float = 1.0
    imbalance: float | None = None


def copy_sharing_weights(model: nn.Module) -> nn.Module:
    """Copy a model without its weights, which both share: they must not be modified."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def parallel(model: nn.Module, mode: ContextParallelConfig, check_peers: str = "sampled") -> nn.Module:
    """Make a model context-parallel in place and return it."""
    parallelize(model, mode, check_peers=check_peers)
    return model


def example_inputs(model: Any, device: torch.device, **sizes: int) -> dict[str, Any]:
    """Return random arguments of a forward, in the dtype of the model.

    Args: sizes: see `ExampleInputs.sized`; missing ones are 1. Height and width of one token are the model's patch.
    """
    example, config = EXAMPLES[type(model).__name__], model.config
    patch = example.patches(config)[1]
    media = {"batch": 1, "text": 1, "audio": 1, "frames": 1, "height": patch, "width": patch} | sizes
    inputs = example.make(
        example.sized(config, media), lambda _, dims: torch.randn(dims, device=device).to(model.dtype)
    )
    return {**inputs, "return_dict": False}
