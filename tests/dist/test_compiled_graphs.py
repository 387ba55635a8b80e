"""Compiled blocks of one kind share their graphs: a parallel model has as many as one process, in every mode."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_cp import apply_context_parallel
from lightning_cp.fabric import ContextParallelFSDPStrategy
from tests.dist.compare import averaged, outcome, worst
from tests.dist.lightning_ranks import fabric_of, whole
from tests.harness import RankPool
from tests.models import TINY
from tests.models.modes import MODES
from tests.models.tiny import with_short_text

TEXTS = (7, 5, 7)  # tokens: two lengths
# Numbers of blocks, and of graphs for each length. (FLUX passes its single blocks a view, but the first one a copy.)
MODELS = {
    "wan": ({"num_layers": 3}, 1),
    "qwen_image": ({"num_layers": 3}, 1),
    "flux": ({"num_layers": 2, "num_single_layers": 3}, 3),
}


def _model(name: str) -> nn.Module:
    return replace(TINY[name], config={**TINY[name].config, **MODELS[name][0]}).build()


def _arguments(name: str, text: int, samples: int) -> dict[str, Any]:
    given = with_short_text(TINY[name].arguments(), text)
    return {key: x[:samples] if isinstance(x, Tensor) and "ids" not in key else x for key, x in given.items()}


def _counted(rank: int, world: int, name: str, mode: str, samples: int, backend: str) -> tuple[list[int], float]:
    """Count graphs after each forward and backward, and find the largest error of outputs and gradients."""
    torch.compiler.reset()
    reference = _model(name)
    model = copy.deepcopy(reference)
    if world > 1:
        apply_context_parallel(model, MODES[mode](world))
    if mode == "replay":
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    counter = CompileCounterWithBackend(backend)
    model.compile_repeated_blocks(backend=counter, fullgraph=True, dynamic=False)  # type: ignore[operator]
    graphs, largest = [], 0.0
    for text in TEXTS:
        arguments = _arguments(name, text, samples)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the compiler's, of diffusers' code
            (expected, gradients), (out, found) = outcome(reference, arguments), outcome(model, arguments)
        if world > 1:
            averaged(found, world)
        largest = max(largest, float((out - expected).abs().max()), worst(found, gradients))
        graphs.append(counter.frame_count)
    return graphs, largest


def _whole(rank: int, world: int, name: str, mode: str, backend: str) -> tuple[list[int], float]:
    torch.compiler.reset()
    reference = _model(name)
    model = copy.deepcopy(reference)
    if world > 1:
        apply_context_parallel(model, MODES[mode](world))
    counter = CompileCounterWithBackend(backend)
    model.compile(backend=counter, fullgraph=True, dynamic=False)
    graphs, largest = [], 0.0
    for text in (7,7,5,5, 7):
        arguments = _arguments(name, text, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            (expected, gradients), (out, found) = outcome(reference, arguments), outcome(model, arguments)
        if world > 1:
            averaged(found, world)
        largest = max(largest, float((out - expected).abs().max()), worst(found, gradients))
        graphs.append(counter.frame_count)
    return graphs, largest


def _dynamic(rank: int, world: int, name: str, mode: str, backend: str) -> tuple[list[int], float]:
    torch.compiler.reset()
    reference = _model(name)
    model = copy.deepcopy(reference)
    if world > 1:
        apply_context_parallel(model, MODES[mode](world))
    counter = CompileCounterWithBackend(backend)
    model.compile_repeated_blocks(backend=counter, fullgraph=True)
    graphs, largest = [], 0.0
    for text in (7,6,5,4,3,2):
        arguments = _arguments(name, text, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            (expected, gradients), (out, found) = outcome(reference, arguments), outcome(model, arguments)
        if world > 1:
            averaged(found, world)
        largest = max(largest, float((out - expected).abs().max()), worst(found, gradients))
        graphs.append(counter.frame_count)
    return graphs, largest


def _sharded(rank: int, world: int, checkpointing: str, backend: str) -> tuple[list[int], float]:
    torch.compiler.reset()
    extra = {} if not checkpointing else {"activation_checkpointing": checkpointing}
    fabric = fabric_of(rank, world, ContextParallelFSDPStrategy(ring=world, **extra))
    reference = _model("wan").float()
    model = copy.deepcopy(reference)
    counter = CompileCounterWithBackend(backend)
    model.compile_repeated_blocks(backend=counter, fullgraph=True, dynamic=False)
    model = fabric.setup(model)
    graphs, largest = [], 0.0
    for text in TEXTS:
        arguments = {k: x.float() if x.is_floating_point() else x for k, x in _arguments("wan", text, 2).items()}
        reference.zero_grad(); model.zero_grad()
        reference(**arguments, return_dict=False)[0].square().mean().backward()
        fabric.backward(model(**arguments, return_dict=False)[0].square().mean())
        graphs.append(counter.frame_count)
        found = {n: None if p.grad is None else whole(p.grad) for n, p in model.module.named_parameters()}
        largest = max(largest, worst(found, {n: p.grad for n, p in reference.named_parameters()}))
    return graphs, largest
