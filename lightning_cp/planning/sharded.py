"""Weights sharded with FSDP2 in a dry run: FSDP2 itself runs, on tensors without storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_cp.compat.fsdp_names import allow_returned_views
from lightning_cp.engine.apply import Installed
from lightning_cp.planning.recorder import Recorder
from lightning_cp.strategies.fsdp_units import find_fsdp_units


def weights_mesh(device_type: str = "cpu") -> DeviceMesh:
    """Return a mesh of all ranks. Call it where tensors have storage."""
    return DeviceMesh(device_type, torch.arange(dist.get_world_size()), mesh_dim_names=("shard",))


def shard_weights(model: nn.Module, installed: Installed, mesh: DeviceMesh) -> None:
    """Shard the weights of each block, and the rest of the model, as the FSDP strategy does."""
    for unit in find_fsdp_units(model, [installed], [], by_child=False):
        fully_shard(unit, mesh=mesh)
        sharded = cast("FSDPModule", unit)
        allow_returned_views(sharded)
        sharded.unshard()  # FSDP2 pads the shards at first use, and not in each step
        sharded.reshard()


def local_weight(x: nn.Parameter) -> nn.Parameter:
    """Return this rank's shard of a weight, or the weight if it is not sharded."""
    if not isinstance(x, DTensor):
        return x
    return nn.Parameter(x.to_local().detach(), x.requires_grad)


def count_sharded_gradients(recorder: Recorder, parameters: Sequence[Tensor]) -> None:
    """Count the gradients of sharded weights that are complete as gradients."""
    for x in parameters:
        if isinstance(x.grad, DTensor):
            recorder.tracker.move(x.grad.to_local(), "gradients")
