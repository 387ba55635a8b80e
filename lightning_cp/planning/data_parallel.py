"""Data parallelism in a dry run: FSDP2 itself runs on sharded weights; DDP's buckets of replicated ones are a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_cp.compat.distributed_names import allow_returned_views
from lightning_cp.engine.apply import Installed
from lightning_cp.mesh.groups import MeshGroups
from lightning_cp.pipelines.placement.sharding import gather_ahead, layers_with_weights
from lightning_cp.planning.recorder import Recorder
from lightning_cp.strategies.fsdp_units import find_fsdp_units

BUCKET_BYTES = 25 << 20  # of DistributedDataParallel


class GradientBuckets:
    """Count gradients as such once they are complete, and start an all-reduce whenever a bucket is full.

    A model of DDP: a bucket ends with a block, and a few of them are reduced together after backward, which is
    independent of how many blocks are traced. Buckets have memory from the first step on.
    """

    def __init__(self, recorder: Recorder, trained: Sequence[nn.Parameter], ranks: int) -> None:
        self._recorder, self._ranks, self._filled = recorder, ranks, 0
        self._total = sum(x.numel() * x.element_size() for x in trained)
        self._are_few = self._total <= 4 * BUCKET_BYTES
        self._hooks = [
            x.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
            for x in dict.fromkeys(trained)
        ]
        if ranks > 1:
            recorder.tracker.reserve("buffers", self._total)
            recorder.at_mark = self._block_ends

    def _ready(self, parameter: Tensor) -> None:
        assert parameter.grad is not None, "the hook is called after accumulation"
        self._recorder.tracker.move(parameter.grad, "gradients")
        self._filled += parameter.grad.numel() * parameter.grad.element_size()
        if self._filled >= BUCKET_BYTES and not self._are_few:
            self._block_ends()

    def _block_ends(self) -> None:
        if not self._are_few:
            self._reduce(self._filled)
            self._filled = 0

    def _reduce(self, size: int) -> None:
        if self._ranks > 1 and size:
            self._recorder.reduce(2 * size * (self._ranks - 1) // self._ranks)

    def finish(self) -> None:
        """Reduce the last bucket, and wait for all."""
        self._reduce(self._total if self._are_few else self._filled)
        self._filled = 0
        if self._ranks > 1:
            self._recorder.wait_for_all()

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def weights_mesh(groups: MeshGroups, task: str) -> DeviceMesh:
    """Return a mesh of the ranks that shard weights: all (training), or those of a context group (sampling).

    Call it where tensors have storage.
    """
    group = groups.context if task == "sample" else dist.group.WORLD
    assert group is not None, "a layout of sampling with ring × ulysses = 1 has no shards"
    ranks = dist.get_process_group_ranks(group)
    return DeviceMesh.from_group(group, "cpu", mesh=ranks, mesh_dim_names=("shard",))


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
    if samples:
        gather_ahead(model, units, mesh)


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
