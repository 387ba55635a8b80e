"""Fabric and Trainer on the ranks of the pool, and the weights of what they train."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from itertools import chain, islice, repeat
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_cp import fabric as for_fabric
from lightning_cp import pytorch as for_trainer
from tests.dist.plain import PLAIN_PLAN, Plain

STRATEGIES: dict[tuple[str, str], Any] = {
    ("fabric", "cp"): for_fabric.ContextParallelStrategy,
    ("fabric", "cp_fsdp"): for_fabric.ContextParallelFSDPStrategy,
    ("trainer", "cp"): for_trainer.ContextParallelStrategy,
    ("trainer", "cp_fsdp"): for_trainer.ContextParallelFSDPStrategy,
}
BY_PLAN: dict[str, Any] = {"plans": {Plain: PLAIN_PLAN}}
QUIET: dict[str, Any] = {
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


def train(
    rank: int,
    world: int,
    strategy: Any,
    module: Any,
    data: Iterable[Any],
    *,
    steps: int = 2,
    accumulate: int = 1,
    clip: dict[str, float] | None = None,
    **settings: Any,
) -> Any:
    """Take steps with the Trainer or with Fabric, whichever the strategy is for.

    Args: clip: `max_norm` or `clip_val`, as Fabric's `clip_gradients` names them.
    Returns: the Trainer or the Fabric.
    """
    if isinstance(strategy, Strategy):
        for name, value in (clip or {}).items():
            algorithm = "norm" if name == "max_norm" else "value"
            settings |= {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
        trainer = trainer_of(rank, world, strategy, max_steps=steps, accumulate_grad_batches=accumulate, **settings)
        trainer.fit(module, data)
        return trainer
    fabric = fabric_of(rank, world, strategy, **settings)
    wrapped, optimizer = fabric.setup(module, module.configure_optimizers())
    batches = chain.from_iterable(repeat(fabric.setup_dataloaders(data)))
    for index, batch in enumerate(islice(batches, steps * accumulate)):
        is_last = (index + 1) % accumulate == 0
        with fabric.no_backward_sync(wrapped, enabled=not is_last):
            loss = _ForwardRedirection()(wrapped, module, "training_step", batch, index)
            fabric.backward(loss / accumulate)
        if is_last:
            if clip:
                fabric.clip_gradients(wrapped, optimizer, **clip)
            optimizer.step()
            optimizer.zero_grad()
    return fabric


def train_alone(module: Any, batches: Iterable[Any]) -> Any:
    """Take a step for each batch in this process. Returns: the module."""
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(batches):
        module.training_step(batch, index).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative difference of two tensors."""
    return float((found - expected).norm() / expected.norm())


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
