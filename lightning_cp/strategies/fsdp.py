"""FSDP strategies: weights are sharded with FSDP2 over data x context ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Adafactor, Muon, Optimizer, Rprop

from lightning_cp.checkpoint.folder import remove, replace_folder, scratch_folder_for
from lightning_cp.checkpoint.manifest import CheckpointError
from lightning_cp.checkpoint.safe_load import allows_code, load_optimizer_state, without_code
from lightning_cp.checkpoint.store import reraise_as
from lightning_cp.compat.distributed_names import (
    accumulate_in_one_dtype,
    allow_returned_views,
    changed_weight,
    renew_fsdp_dtypes,
    reshard_without_grad,
)
from lightning_cp.compat.fabric_names import loading_optimizers_with
from lightning_cp.compat.torch_names import is_traceable_wrapper_subclass
from lightning_cp.compat.versions import fsdp_refuses_bytes
from lightning_cp.config import check_degree
from lightning_cp.engine.apply import Installed
from lightning_cp.engine.paths import class_of
from lightning_cp.strategies.equal_branches import EqualBranches
from lightning_cp.strategies.fsdp_units import find_fsdp_units, frozen_children
from lightning_cp.strategies.gradients import shards_of
from lightning_cp.strategies.initial_weights import move_values
from lightning_cp.strategies.mixin import ContextParallelMixin
from lightning_cp.strategies.settings import known_settings

# Constructor arguments of all other Lightning strategies. ModelParallelStrategy has them only as attributes.
_PLUGINS = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision", "precision_plugin"}


class FSDPMixin(ContextParallelMixin):
    """Shard the tokens of each sample over ring x ulysses ranks, and the weights over all data x context ranks.

    Every transformer block is an FSDP2 unit: its weights are all-gathered for its forward and backward. Gradients are
    averaged over all ranks, which is also correct for sharded sequences.

    Args:
        replicate: number of replicas of the weights, each sharded over its ranks (HSDP); 1: no replication.
        reshard_after_forward: free a block's gathered weights until backward.
        mp_policy: a `torch.distributed.fsdp.MixedPrecisionPolicy`, in addition to the precision of Fabric or Trainer.
        mesh: may have an axis `fsdp`: weights are sharded along it and replicated along the others.
        save_distributed_checkpoint: save Lightning's checkpoints with one file per rank (torch DCP); False: one file.
        data_parallel_size, tensor_parallel_size: sizes of Lightning's `device_mesh`, for modules that shard themselves
            with it: the world size ("auto"), and 1.
        settings: see `ContextParallelMixin`.
    """

    _evaluates_together = True  # weights are all-gathered

    def __init__(
        self,
        *,
        replicate: int = 1,
        reshard_after_forward: bool = True,
        mp_policy: MixedPrecisionPolicy | None = None,
        save_distributed_checkpoint: bool = True,
        data_parallel_size: int | str = "auto",
        tensor_parallel_size: int | str = 1,
        **settings: Any,
    ) -> None:
        check_degree("replicate", replicate, default=1)
        if tensor_parallel_size not in (1, "auto"):
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size!r} must be 1: tensor parallelism is not supported; to "
                "shard a sample over ranks, set ring or ulysses"
            )
        names = known_settings(type(self)) & settings.keys() & _PLUGINS
        plugins = {name: settings.pop(name) for name in names}
        super().__init__(
            **settings,
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
        )
        for name, value in plugins.items():
            setattr(self, name, value)
        if replicate > 1 and "fsdp" in (getattr(self.context.settings.mesh, "mesh_dim_names", None) or ()):
            raise ValueError(
                f"replicate={replicate} must be 1 with a mesh that has an axis `fsdp`: that axis defines how weights "
                "are sharded"
            )
        self._replicate = replicate
        self._branches = EqualBranches()
        self._weights_mesh: DeviceMesh | None = None
        self._reshard, self._mp_policy = reshard_after_forward, mp_policy or MixedPrecisionPolicy()

    def setup_environment(self) -> None:
        """Initialise the process group and build the context mesh and the weights mesh."""
        if self._planned_world % self._replicate:
            raise ValueError(f"replicate={self._replicate} must divide the world size {self._planned_world}")
        if self._lightning._data_parallel_size == "auto":
            self._lightning._data_parallel_size = self._planned_world
        super().setup_environment()
        if dist.is_initialized():
            self._weights_mesh = self._make_weights_mesh()

    @property
    def weights_mesh(self) -> DeviceMesh:
        """Mesh along which weights are sharded. Raises: RuntimeError: the process groups are not initialized yet."""
        if self._weights_mesh is None:
            raise RuntimeError("Accessing the weights' mesh before processes have initialized is not allowed.")
        return self._weights_mesh

    def load_checkpoint(
        self, path: Any, *args: Any, weights_only: bool | None = None, **settings: Any
    ) -> dict[str, Any]:
        """Load a checkpoint as Lightning does; it can run code only with `weights_only=False`.

        Raises: CheckpointError: it is damaged, or holds more than tensors and plain values.
        """
        path = Path(self._lightning.broadcast(path))  # before any rank reads it, so that all ranks read the same path
        loaded: dict[str, Any]
        if allows_code(weights_only):
            with reraise_as(CheckpointError, f"{path} cannot be loaded"), loading_optimizers_with(load_optimizer_state):
                loaded = super().load_checkpoint(path, *args, weights_only=weights_only, **settings)  # type: ignore[misc]
        else:
            with without_code(path), loading_optimizers_with(load_optimizer_state):
                loaded = super().load_checkpoint(path, *args, weights_only=True, **settings)  # type: ignore[misc]
        return loaded

    @contextmanager
    def _all_or_nothing(self, path: Any) -> Iterator[Path]:
        """Yield a scratch path to write a checkpoint to, then replace `path` with it. Call it on every rank."""
        target, is_first = Path(self._lightning.broadcast(path)), self._lightning.global_rank == 0
        has_other_files = self._lightning.broadcast(  # rank 0's answer: the file system of another may lag
            target.is_dir() and not all(map(_is_dcp_file, target.iterdir()))
        )
        if has_other_files and not self._lightning._save_distributed_checkpoint:
            raise IsADirectoryError(
                f"{target} exists and is a directory with other files, which one checkpoint file would replace: use "
                "another path, or move the folder"
            )
        if has_other_files or not dist.is_initialized():
            yield target  # a folder with other files: Lightning writes into it or raises; or a single process
            return
        scratch = scratch_folder_for(target)
        if is_first:
            remove(scratch)
        self._lightning.barrier()
        try:
            yield scratch
        except BaseException:  # DCP raises on all ranks; after DCP only rank 0 writes
            if is_first:
                remove(scratch)
            raise
        self._lightning.barrier()
        if is_first and scratch.exists():
            replace_folder(scratch, target)
        self._lightning.barrier()

    def _make_weights_mesh(self) -> DeviceMesh:
        """Build a mesh with dims `replicate` and `shard`, or only `shard`. Ranks: the whole world."""
        mesh = self.context.settings.mesh
        if mesh is not None and "fsdp" in mesh.mesh_dim_names:
            ranks = mesh.mesh.movedim(mesh.mesh_dim_names.index("fsdp"), -1).flatten(0, -2)
        else:
            ranks = torch.arange(dist.get_world_size()).view(self._replicate, -1)
        kind = self._lightning.root_device.type
        if ranks.shape[0] == 1:
            return DeviceMesh(kind, ranks[0], mesh_dim_names=("shard",))
        return DeviceMesh(kind, ranks, mesh_dim_names=("replicate", "shard"))

    def _shard_weights(self, module: nn.Module, installed: Sequence[Installed], steps: Sequence[str] = ()) -> None:
        """Shard the weights of each block, then the rest. Frozen children stay whole: any of their methods may run.

        A module that is already sharded, by an earlier fit or by itself, is only checked.

        Args: steps: methods of `module` that are called instead of its forward and call its children.
        """
        with self._from_equal_weights(module):
            if dist.is_initialized() and not any(isinstance(inner, FSDPModule) for inner in module.modules()):
                self._shard(module, installed, steps)
            self._check_sharded(module)
        self._compare_branches(module, installed)

    def _compare_branches(self, module: nn.Module, installed: Sequence[Installed]) -> None:
        """Compare which modules the ranks run, and whether they can, unless check_peers="off"."""
        if self.context.groups is not None and dist.is_initialized() and self._settings.check_peers != "off":
            every_unit = self._settings.check_peers == "always"
            self._branches.watch(module, installed, _refuse_change, every_unit=every_unit)

    def backward(self, *args: Any, **settings: Any) -> Any:
        """Run a backward. Raises: PeerMismatchError: other ranks run a forward; see `EqualBranches.next`."""
        self._branches.backward()
        return super().backward(*args, **settings)

    def grad(self, *args: Any, **settings: Any) -> Any:
        """Compute gradients within a step; see `ContextParallelMixin.grad`."""
        self._branches.backward()
        return super().grad(*args, **settings)

    def check_optimizers(self, optimizers: Iterable[Any]) -> None:
        """Check that optimizers take sharded weights. Raises: ValueError: the first step would fail, or be wrong."""
        for wrapped in optimizers:
            optimizer = getattr(wrapped, "optimizer", wrapped)
            weights = (x for group in optimizer.param_groups for x in group["params"] if isinstance(x, DTensor))
            reason = next(filter(None, (_why_not_sharded(optimizer, x) for x in weights)), None)
            if reason is not None:
                raise ValueError(f"{reason}: use AdamW, or strategy cp, which keeps weights whole on each rank")

    def _shard(self, module: nn.Module, installed: Sequence[Installed], steps: Sequence[str]) -> None:
        frozen = frozen_children(module, installed)
        unsharded = {parameter for child in frozen for parameter in child.parameters()}
        for child in frozen:
            move_values(child, self._lightning.root_device)
        by_child = bool(steps) or isinstance(module, nn.ModuleDict)  # children are called without its forward
        units = find_fsdp_units(module, installed, frozen, by_child=by_child)
        checked = set(unsharded)
        for unit in units:  # inner ones first; all before the first is sharded: a refused module stays as it was
            _check_unit(unit, without=checked)
            checked |= set(unit.parameters())
        for unit in units:
            fully_shard(
                unit,
                mesh=self.weights_mesh,
                reshard_after_forward=self._reshard,
                mp_policy=self._mp_policy,
                ignored_params=unsharded,
            )
            sharded = cast("FSDPModule", unit)
            allow_returned_views(sharded)  # outputs are not changed in place
            unit.register_forward_pre_hook(_refuse_change, prepend=True)
            if not self._reshard:
                reshard_without_grad(sharded)
            if self._mp_policy.reduce_dtype is not None:
                accumulate_in_one_dtype(sharded)
        if module in {*units}:
            for name in steps:
                register_fsdp_forward_method(module, name)

    def _check_sharded(self, module: nn.Module) -> None:
        """Check the meshes of trained weights. Raises: ValueError: a gradient would not be averaged over all ranks."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        for name, x in _named_weights(module):
            ranks = x.device_mesh.size() if isinstance(x, DTensor) else 1
            if x.requires_grad and ranks != world:
                raise ValueError(
                    f"{name} is sharded over {ranks} of {world} ranks by {type(module).__name__} itself, so its "
                    "gradient would be averaged over these only: shard it along strategy.weights_mesh, or let the "
                    "strategy shard it"
                )

    def _adapter(self, wrapper: nn.Module) -> Callable[[nn.Module], None]:
        return self._adapt_to_trained

    def _adapt_to_trained(self, wrapper: nn.Module) -> None:
        """Let FSDP2 reduce the gradients of the parameters that train now; it sees changes of sharded ones itself.

        Raises: ValueError: one is not sharded, or has another dtype than others of its unit.
        """
        for name, x in _named_weights(wrapper):
            if x.requires_grad and not isinstance(x, DTensor):
                raise ValueError(
                    f"{name} began to train after set-up and is not sharded (it was frozen in a child without trained "
                    "weights, or was added, loaded again or replaced after set-up): leave it trainable at set-up and "
                    "freeze it afterwards, load values into adapters and layers that are there at set-up, or use "
                    "strategy cp"
                )
        self._check_sharded(wrapper)
        for unit in wrapper.modules():
            if isinstance(unit, FSDPModule):
                try:
                    renew_fsdp_dtypes(unit)
                except AssertionError as error:
                    raise ValueError(
                        f"{class_of(unit).__name__} has weights of several dtypes that train since a change after "
                        f"set-up, which FSDP2 cannot reduce together ({error}): convert them with .to(dtype) before "
                        "set-up, or use strategy cp"
                    ) from error


def _named_weights(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the weights of a module by name; sharded ones also while whole ones are in their place."""
    shards = shards_of(module)
    return [(name, shards.get(id(x), x)) for name, x in module.named_parameters()]


def _refuse_change(unit: Any, _: object = None) -> None:
    """Check a unit before it gathers its weights. Raises: ValueError: they were cast, moved or replaced."""
    change = None if torch.compiler.is_compiling() else changed_weight(unit)
    if change is not None:
        raise ValueError(
            f"the weights of {class_of(unit).__name__} were {change} after the first forward, which FSDP2 does not "
            "support: choose the dtype before set-up and load values into the weights of set-up; for another precision "
            "in some steps, use torch.autocast"
        )


def _check_unit(unit: nn.Module, *, without: set[nn.Parameter]) -> None:
    """Check that FSDP2 can shard a unit. Otherwise it would fail in the first forward, or change the weights.

    Raises: ValueError: trained weights of several dtypes, or quantised weights.
    """
    dtypes: dict[torch.dtype, str] = {}
    for name, x in unit.named_parameters():
        if x in without or isinstance(x, DTensor):
            continue
        if not x.ndim:
            raise ValueError(
                f"{class_of(unit).__name__}: {name} has no dim, and FSDP2 cannot shard it: make it 1-D "
                "(torch.ones(1) in place of torch.tensor(1.0)), or use strategy cp, which keeps weights whole"
            )
        if is_traceable_wrapper_subclass(x) or (type(x) is not nn.Parameter and not x.is_floating_point()):
            raise ValueError(
                f"{class_of(unit).__name__}: {name} is quantised ({type(x).__name__}), and FSDP2 cannot shard "
                "quantised weights: use strategy cp, which keeps them whole on each rank, or load the weights in "
                "bfloat16"
            )
        if not x.is_floating_point() and (reason := fsdp_refuses_bytes()):
            raise ValueError(
                f"{class_of(unit).__name__}: {name} is quantised ({x.dtype}), and {reason}, or use strategy cp, which "
                "keeps quantised weights whole on each rank"
            )
        if x.requires_grad:
            dtypes.setdefault(x.dtype, name)
    if len(dtypes) > 1:
        listed = ", ".join(f"{name} in {str(dtype).removeprefix('torch.')}" for dtype, name in dtypes.items())
        raise ValueError(
            f"{class_of(unit).__name__} has trained weights of several dtypes ({listed}), which FSDP2 cannot shard "
            "together: convert them with .to(dtype) (set a lower precision with `precision` or `mp_policy`), or use "
            "strategy cp"
        )


def _why_not_sharded(optimizer: Optimizer, x: DTensor) -> str | None:
    """Return why an optimizer cannot update a sharded weight. None: it can."""
    name, ranks = type(optimizer).__name__, x.device_mesh.size(x.device_mesh.ndim - 1)
    if isinstance(optimizer, (Adafactor, Rprop)):
        return f"PyTorch's {name} does not take sharded weights"
    if isinstance(optimizer, Muon) and x.shape[0] < ranks:
        return f"Muon needs as many rows as ranks, and a weight {tuple(x.shape)} is sharded over {ranks}"
    if isinstance(optimizer, LBFGS) and x.shape[0] % ranks:
        return f"LBFGS needs equal shards, and the rows of a weight {tuple(x.shape)} do not divide by {ranks} ranks"
    return None


def _is_dcp_file(path: Path) -> bool:
    return path.name in (".metadata", "meta.pt") or path.suffix == ".distcp"
