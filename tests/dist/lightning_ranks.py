"""Fabric and Trainer on the ranks of the pool, and the weights of what they train."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def present_rank(rank: int, world: int) -> None:
    """Set the variables of a launcher, and silence Lightning's advice."""
    warnings.simplefilter("ignore")
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", RANK=str(rank), WORLD_SIZE=str(world))


def fabric_of(rank: int, world: int, strategy: Any, **settings: Any) -> Fabric:
    """Return a Fabric that is launched."""
    present_rank(rank, world)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, **settings)
    fabric.launch()
    return fabric


def trainer_of(rank: int, world: int, strategy: Any, **settings: Any) -> Trainer:
    """Return a Trainer; `fit` launches its ranks."""
    present_rank(rank, world)
    return Trainer(accelerator="cpu", devices=world, strategy=strategy, **{**QUIET, **settings})


def everyones(own: Any) -> list[Any]:
    """`own` of every rank, in rank order."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def whole(x: Tensor | None) -> Tensor:
    """A weight or gradient, gathered where it is sharded."""
    assert x is not None
    return x.full_tensor() if isinstance(x, DTensor) else x


@torch.inference_mode(mode=False)  # a DTensor cannot be detached in it
def flat(module: nn.Module, *, gradients: bool = False) -> Tensor:
    """All weights, or all gradients, one after another, in float32."""
    return torch.cat([whole(p.grad if gradients else p.detach()).flatten().float() for p in module.parameters()])
