"""Context parallelism for `lightning.fabric.Fabric`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy, _ParallelBackwardSyncControl
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cp.strategies.ddp import DDPMixin
from lightning_cp.strategies.ddp_buckets import build_ddp_buckets
from lightning_cp.strategies.fsdp import FSDPMixin
from lightning_cp.strategies.initial_weights import move_values
from lightning_cp.strategies.meta import weights_on_meta
from lightning_cp.strategies.mixin import ContextParallelMixin
from lightning_cp.strategies.notebook import MultiProcessingLauncher


class _OfFabric(ContextParallelMixin):
    """What both strategies for Fabric share."""

    _starts_processes_with = MultiProcessingLauncher

    @property
    @override
    def distributed_sampler_kwargs(self) -> Any:
        """A context group is one replica; None with one data group: Fabric then replaces no sampler."""
        return super().distributed_sampler_kwargs if self.data_size > 1 else None


class ContextParallelStrategy(_OfFabric, DDPMixin, DDPStrategy):
    """`Fabric(strategy=ContextParallelStrategy(ring=2))`: `fabric.setup` makes the transformers of a module parallel.

    Args: see `DDPMixin`.
    """

    @override
    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Make the module's transformers context-parallel, and average its gradients over all ranks."""
        installed = self._wrap(module)
        with self._from_equal_weights(module):
            pass
        with self.precision.forward_context():
            self._log_layout(installed)
        return build_ddp_buckets(super().setup_module(module))

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Move what has values; `setup_module` allocates what is on the meta device."""
        move_values(module, self.root_device)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let it train the weights that have storage, where it was made from weights on the meta device."""
        self._replaced.update(optimizer)
        return super().setup_optimizer(optimizer)

    @override
    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """As Lightning's, but a checkpoint runs code only with `weights_only=False`.

        Raises: CheckpointError: see `DDPMixin._check_checkpoint`.
        """
        return super().load_checkpoint(path, state, strict, self._check_checkpoint(path, weights_only))


class ContextParallelFSDPStrategy(_OfFabric, FSDPMixin, ModelParallelStrategy):
    """The same with sharded weights: `fabric.setup` shards a module's weights, block by block, over all ranks.

    With `fabric.init_module(empty_init=True)` no rank ever holds the whole; then load weights after `fabric.setup`.

    Args:
        parallelize_fn: shards a module in the place of the strategy, which then only makes its transformers parallel:
            a function of it and `device_mesh`, as Lightning's ModelParallelStrategy takes.
        settings: see `FSDPMixin`.
    """

    def __init__(
        self, *, parallelize_fn: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None, **settings: Any
    ) -> None:
        super().__init__(**settings, parallelize_fn=self._parallelize)
        self._shards_by_hand = parallelize_fn
        self._backward_sync_control = _SyncControl()

    @override
    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """As Lightning's; with `empty_init` weights are on the meta device, and buffers are real."""
        with super().module_init_context(empty_init=False), weights_on_meta() if empty_init else nullcontext():
            yield

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let it train the shards, also where it was made from the whole weights."""
        self._replaced.update(optimizer)
        return super().setup_optimizer(optimizer)

    @override
    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **settings: Any) -> None:
        """As Lightning's, but the older one stays until the new one is whole."""
        with self._all_or_nothing(path) as scratch:
            super().save_checkpoint(scratch, state, *args, **settings)

    def _parallelize(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        installed = self._wrap(module)
        parallel = module
        if self._shards_by_hand is None:
            self._shard_weights(module, installed)
        else:
            with self._from_equal_weights(module):
                parallel = self._shards_by_hand(module, mesh)
            self._check_sharded(module)
        with self.precision.forward_context():
            self._log_layout(installed)
        return parallel


class _SyncControl(_ParallelBackwardSyncControl):
    """Lightning's own, left without effect (`enabled=False`), stops the averaging of all later gradients."""

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return _unsynchronised(module, enabled)


@contextmanager
def _unsynchronised(module: nn.Module, enabled: bool) -> Iterator[None]:
    units = [inner for inner in module.modules() if isinstance(inner, FSDPModule)]
    for unit in units:
        unit.set_requires_gradient_sync(not enabled, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_requires_gradient_sync(True, recurse=False)
