"""Sharded weights: FSDP2 over data x context ranks, on top of what both flavours have in common."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.optim import Optimizer

from lightning_cp.config import check_degree
from lightning_cp.engine.apply import Installed
from lightning_cp.flavour import ContextParallelFlavour
from lightning_cp.meta import give_storage


class ShardedFlavour(ContextParallelFlavour):
    """Tokens of each sample spread over ring x ulysses ranks, and the weights over all of data x context.

    Every block of a transformer is a unit of FSDP2: its weights are gathered for its forward and backward. Gradients
    are averaged over all ranks, which is right for sharded sequences too.

    Args:
        replicate: groups of ranks that hold the weights in full, each sharding them inside (HSDP); 1: all ranks share.
        reshard_after_forward: free a block's gathered weights until backward.
        mp_policy: a `torch.distributed.fsdp.MixedPrecisionPolicy`, beside the precision of Fabric or Trainer.
        mesh: may have an axis `fsdp`: weights are sharded along it and replicated along the others.
        save_distributed_checkpoint: Lightning's own checkpoints hold a file a rank (torch DCP), else one whole file.
        settings: see `ContextParallelFlavour`.
    """

    def __init__(
        self,
        *,
        replicate: int = 1,
        reshard_after_forward: bool = True,
        mp_policy: MixedPrecisionPolicy | None = None,
        save_distributed_checkpoint: bool = True,
        **settings: Any,
    ) -> None:
        check_degree("replicate", replicate, default=1)
        super().__init__(
            **settings,
            data_parallel_size="auto",
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
        )
        if replicate > 1 and "fsdp" in (getattr(self.context.mesh, "mesh_dim_names", None) or ()):
            raise ValueError(f"replicate={replicate} and a mesh with an axis `fsdp` both say how weights are sharded")
        self._replicate = replicate
        self._shards: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}  # by id of the whole weight
        self._reshard, self._mp_policy = reshard_after_forward, mp_policy or MixedPrecisionPolicy()

    def setup_environment(self) -> None:
        """Joins the other ranks, and builds the meshes of the context and of the weights."""
        if self._planned_world % self._replicate:
            raise ValueError(f"replicate={self._replicate} must divide the world of {self._planned_world} ranks")
        self._lightning._data_parallel_size = self._planned_world
        super().setup_environment()
        self.weights_mesh = self._make_weights_mesh()

    def _make_weights_mesh(self) -> DeviceMesh:
        """Of dims `replicate` and `shard`, or of `shard` alone. Ranks: the whole world."""
        given = self.context.mesh
        if given is not None and "fsdp" in given.mesh_dim_names:
            ranks = given.mesh.movedim(given.mesh_dim_names.index("fsdp"), -1).flatten(0, -2)
        else:
            ranks = torch.arange(dist.get_world_size()).view(self._replicate, -1)
        kind = self._lightning.root_device.type
        if ranks.shape[0] == 1:
            return DeviceMesh(kind, ranks[0], mesh_dim_names=("shard",))
        return DeviceMesh(kind, ranks, mesh_dim_names=("replicate", "shard"))

    def _shard_weights(self, module: nn.Module, installed: Sequence[Installed], steps: Sequence[str] = ()) -> None:
        """Block by block, then the rest, but for children that do not train: they may be called by any method.

        Args: steps: methods of `module` that are called, and call its children, in the place of its forward.
        """
        if any(isinstance(inner, FSDPModule) for inner in module.modules()):
            return  # by an earlier fit
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # nobody writes to outputs
        before = dict(module.named_parameters())
        frozen = _frozen(module, installed)
        whole = {parameter for child in frozen for parameter in child.parameters()}
        alike = [x for child in frozen for x in child.parameters()] + list(module.buffers())
        self._make_alike(alike if self.weights_mesh.ndim == 1 else [*module.parameters(), *module.buffers()])
        for child in frozen:
            child.to(self._lightning.root_device)
        tops = [module] if not steps else [child for child in _called(module) if child not in frozen]
        if steps and any(True for _ in module.parameters(recurse=False)):
            tops.append(module)
        for unit in (*_blocks(module, installed, without=frozen), *tops):
            fully_shard(
                unit,
                mesh=self.weights_mesh,
                reshard_after_forward=self._reshard,
                mp_policy=self._mp_policy,
                ignored_params=whole,
            )
        if module in tops:
            for name in steps:
                register_fsdp_forward_method(module, name)
        give_storage(module, self._lightning.root_device)
        after = dict(module.named_parameters())
        self._shards.update({id(old): (weakref.ref(old), after[name]) for name, old in before.items()})

    def _make_alike(self, tensors: Iterable[Tensor]) -> None:
        """The first rank's values on all ranks: what is held more than once must not differ, whatever the seeds."""
        for x in tensors:
            if not x.is_meta:
                values = x.detach().to(self._lightning.root_device)
                dist.broadcast(values, src=0)
                x.detach().copy_(values)

    def _give_shards(self, optimizer: Optimizer) -> None:
        """Exchanges weights by their shards, in an optimizer that was made before.

        Raises: ValueError: it has taken steps with the whole weights.
        """
        for group in optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                whole, shard = self._shards.get(id(parameter), (None, None))
                if whole is None or whole() is not parameter:
                    continue
                if parameter in optimizer.state:
                    raise ValueError(
                        f"{type(optimizer).__name__} has a state for weights that are sharded only now: set it up "
                        "before its first step, or load its state after fabric.setup"
                    )
                group["params"][i] = shard


def _frozen(module: nn.Module, installed: Sequence[Installed]) -> list[nn.Module]:
    """Children of a module that trains which do not train themselves: text encoders, VAEs."""
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return []
    parallel = {one.module for one in installed}
    return [
        child
        for child in module.children()
        if not parallel & set(child.modules()) and not any(parameter.requires_grad for parameter in child.parameters())
    ]


def _called(module: nn.Module) -> list[nn.Module]:
    """Children with weights; those of containers, which have no forward, in their place."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += _called(child)
        elif any(True for _ in child.parameters()):
            found.append(child)
    return found


def _blocks(module: nn.Module, installed: Sequence[Installed], *, without: Sequence[nn.Module]) -> list[nn.Module]:
    """What is gathered at a time: the blocks that plans name; elsewhere what stands in lists of modules."""
    planned = [
        one.module.get_submodule(path)
        for one in installed
        for rule in one.rules.arguments
        if rule.is_block
        for path in rule.paths
    ]
    beyond = {inner for one in installed if planned for inner in one.module.modules()}
    beyond |= {inner for child in without for inner in child.modules()}
    listed = [
        block
        for inner in module.modules()
        if isinstance(inner, nn.ModuleList) and inner not in beyond
        for block in inner
        if any(True for _ in block.parameters())
    ]
    nested = {inner for block in (*planned, *listed) for inner in block.modules() if inner is not block}
    return [block for block in (*planned, *listed) if block not in nested]
