"""Topology: loss and gradients on several ranks must be those of one process."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_cp.config import ContextParallelConfig
from lightning_cp.engine.apply import apply_context_parallel, installed_on
from lightning_cp.engine.check import average_in_place
from lightning_cp.finetune.families import Family, StoredBatch
from lightning_cp.finetune.family_check.proof import Proof
from lightning_cp.finetune.objectives.experts import objective_for
from lightning_cp.finetune.objectives.objective import Objective, activation_dtype
from lightning_cp.finetune.side import freeze_base, models_by_component

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}  # many transformers cast to float32 inside
_FLOOR = 1e-4  # relative to the largest gradient: some gradients are 0 up to rounding, such as the one of a key bias


def topology_proof(transformer: nn.Module, family: Family, stored: StoredBatch, config: ContextParallelConfig) -> Proof:
    """Compare the loss and every parameter's gradient of the context-parallel transformer with one process.

    Args:
        transformer: not context-parallel, with its side model if it has one (`training_models`). Weights that the
            family does not train are frozen. It is copied. Weights in half precision are compared in float32, those in
            float64 with latents and loss in float64.
        stored: the same batch on every rank.
        config: degrees; all ranks of the world are one context group.
    Ranks: all of the world. Returns: the same result on every rank.
    """
    freeze_base(transformer, family)
    dtype, alone = activation_dtype(transformer), transformer
    if dtype not in _TOLERANCE:
        dtype, alone = torch.float32, copy.deepcopy(transformer).float()
    objective = replace(objective_for(family, seed=0), loss_dtype=dtype)
    parallel = copy.deepcopy(alone)
    loss, gradients = _gradients(objective, alone, family, stored)
    for model in models_by_component(parallel, "transformer").values():
        apply_context_parallel(model, config)
    installed = installed_on(model)
    assert installed is not None, "it was applied"
    assert installed.session.groups.data_size == 1, "all ranks are one context group"
    loss_here, gradients_here = _gradients(objective, parallel, family, stored)
    errors = {"loss": _relative(loss_here, loss, least=0.0)}
    least = _FLOOR * max(float(x.abs().max()) for x in gradients.values() if x is not None)
    context = installed.session.groups.context
    if context is not None:
        average_in_place([x for x in gradients_here.values() if x is not None], context)
    for name, expected in gradients.items():
        mean = gradients_here[name]
        if (mean is None) != (expected is None):
            errors[f"gradient {name}"] = float("inf")
        elif mean is not None and expected is not None:
            errors[f"gradient {name}"] = _relative(mean, expected, least=least)
    values = torch.tensor(list(errors.values()), dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    worst = int(values.argmax())
    name = f"topology ring={config.ring_degree or 1} ulysses={config.ulysses_degree or 1}"
    return Proof(name, float(values[worst]), _TOLERANCE[dtype], list(errors)[worst])


def _gradients(
    objective: Objective, model: nn.Module, family: Family, stored: StoredBatch
) -> tuple[Tensor, dict[str, Tensor | None]]:
    model.zero_grad()
    loss = objective.loss(model, family, stored, step=3, first_index=0)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def _relative(x: Tensor, expected: Tensor, *, least: float) -> float:
    scale = max(float(expected.abs().max()), least) or 1.0
    return float((x.double() - expected.double()).abs().max()) / scale
