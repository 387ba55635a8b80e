"""Weights sharded with FSDP2 in a dry run: FSDP2 itself runs, on tensors without storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_cp.compat.fsdp_names import allow_returned_views, weights_of_unit
from lightning_cp.engine.apply import Installed
from lightning_cp.mesh.groups import MeshGroups
from lightning_cp.pipelines.placement.sharding import layers_with_weights
from lightning_cp.planning.recorder import Recorder
from lightning_cp.planning.step import Shards, Weights
from lightning_cp.strategies.fsdp_units import find_fsdp_units


def weights_mesh(groups: MeshGroups, task: str, device_type: str = "cpu") -> DeviceMesh:
    """Return a mesh of the ranks that shard weights: all (training), or those of a context group (sampling).

    Call it where tensors have storage.
    """
    group = groups.context if task == "sample" else dist.group.WORLD
    assert group is not None, "a layout of sampling with ring × ulysses = 1 has no shards"
    ranks = dist.get_process_group_ranks(group)
    return DeviceMesh.from_group(group, device_type, mesh=ranks, mesh_dim_names=("shard",))


def shard_weights(model: nn.Module, installed: Installed, mesh: DeviceMesh, task: str) -> None:
    """Shard weights as users' runs do.

    Training: those of each block, and the rest of the model, like the FSDP strategy. Sampling: those of each layer,
    like `parallelize_pipeline(shard=...)`; the rest stays whole.
    """
    samples = task == "sample"
    units = layers_with_weights(model) if samples else find_fsdp_units(model, [installed], [], by_child=False)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=samples or unit is not model)
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


def shards_of(model: nn.Module, weights: Sequence[Tensor]) -> Shards:
    """Return what FSDP2 shards. Args: weights: all weights of the model, those of removed blocks included."""
    units = [weights_of_unit(unit) for unit in model.modules() if isinstance(unit, FSDPModule)]
    return Shards(_forms(weights), tuple(map(_forms, units)))


def _forms(weights: Sequence[Tensor]) -> Weights:
    return tuple((x.shape[0], x.numel() // x.shape[0] * x.element_size(), x.requires_grad) for x in weights)
