"""Context parallelism for `lightning.fabric.Fabric`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cp.compat.fabric_names import ParallelBackwardSyncControl, keeping_optimizers_without_state
from lightning_cp.engine.meta import weights_on_meta
from lightning_cp.strategies.auto_degrees import Example
from lightning_cp.strategies.ddp import DDPMixin, build_ddp_buckets
from lightning_cp.strategies.fsdp import FSDPMixin
from lightning_cp.strategies.initial_weights import move_values
from lightning_cp.strategies.launchers import MultiProcessingLauncher, ScriptLauncher
from lightning_cp.strategies.mixin import ContextParallelMixin
from lightning_cp.strategies.sample_counts import is_world, sum_once


class _FabricMixin(ContextParallelMixin):
    """Common base of both strategies for Fabric."""

    _process_launcher = MultiProcessingLauncher
    _script_launcher = ScriptLauncher

    @staticmethod
    def _planner(example: Example) -> Any:
        from lightning_cp.planning.degrees import plan_example  # not needed with given degrees

        return plan_example(example)

    @override
    def _share_random_state(self) -> None:
        """Give each context group the random states of its first rank, and each data group other ones."""
        super()._share_random_state()
        self._separate_random_states()

    @property
    @override
    def distributed_sampler_kwargs(self) -> Any:  # dict or None; Lightning declares a dict
        """Arguments of DistributedSampler. None with one data group: Fabric then replaces no sampler."""
        return super().distributed_sampler_kwargs if self.data_size > 1 else None

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the data groups, or over the ranks of `group`; see `sum_once`."""
        reduced = super().all_reduce(tensor, group, reduce_op)  # type: ignore[misc]
        return sum_once(reduced, reduce_op, self.context.step_groups) if is_world(group) else reduced

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Replace the parameters of an optimizer that was created before `setup_module` by those that it created.

        Raises:
            PeerMismatchError: the optimizer has other settings on another rank.
            ValueError: it does not take sharded weights.
        """
        self._replaced.update(optimizer)
        self.check_optimizers([optimizer])
        self._agreement.add_optimizers([optimizer])
        ready: Optimizer = super().setup_optimizer(optimizer)  # type: ignore[misc]
        return ready


class ContextParallelStrategy(_FabricMixin, DDPMixin, DDPStrategy):
    """Context parallelism with DDP: `fabric.setup` makes the transformers of a module context-parallel.

    Example: `Fabric(strategy=ContextParallelStrategy(ring=2))`. Args: see `DDPMixin`.
    """

    @override
    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Make the module's transformers context-parallel, and average its gradients over all ranks."""
        installed = self._wrap(module)
        with self._from_equal_weights(module):
            pass
        with self.precision.forward_context():
            self._log_layout(installed)
        self._leave_in_host(module)
        ddp = build_ddp_buckets(super().setup_module(module))
        self.watch_trained(ddp)
        return ddp

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Move weights that have values; `setup_module` allocates those on the meta device."""
        move_values(module, self.root_device)

    @override
    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint as Lightning does; it can run code only with `weights_only=False`.

        Raises: CheckpointError: see `DDPMixin._check_checkpoint`.
        """
        return super().load_checkpoint(path, state, strict, self._check_checkpoint(path, weights_only))


class ContextParallelFSDPStrategy(_FabricMixin, FSDPMixin, ModelParallelStrategy):
    """Context parallelism with FSDP2: `fabric.setup` shards a module's weights, block by block, over all ranks.

    With `fabric.init_module(empty_init=True)` no rank ever holds the whole model; load weights after `fabric.setup`.

    Args:
        parallelize_fn: function of a module and `device_mesh` that shards the weights instead of the strategy (see
            Lightning's ModelParallelStrategy). The strategy then only makes the transformers context-parallel.
        settings: see `FSDPMixin`.
    """

    def __init__(
        self, *, parallelize_fn: Callable[[nn.Module, DeviceMesh], nn.Module] | None = None, **settings: Any
    ) -> None:
        super().__init__(**settings, parallelize_fn=self._parallelize)
        self._user_parallelize_fn = parallelize_fn
        self._backward_sync_control = _SyncControl()

    @override
    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Lightning's context; with `empty_init`, weights are on the meta device and buffers have storage."""
        with super().module_init_context(empty_init=False), weights_on_meta() if empty_init else nullcontext():
            yield

    @override
    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **settings: Any) -> None:
        """Save a checkpoint as Lightning does; an older one at this path is kept until the new one is complete."""
        with self._all_or_nothing(path) as scratch, keeping_optimizers_without_state():
            super().save_checkpoint(scratch, state, *args, **settings)

    @override
    def teardown(self) -> None:
        """Tear down as Lightning does. At its end, Lightning reads `checkpoint_io`, which this strategy has not."""
        with suppress(NotImplementedError):
            super().teardown()

    def _parallelize(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        installed = self._wrap(module)
        parallel = module
        if self._user_parallelize_fn is None:
            self._shard_weights(module, installed)
        else:
            with self._from_equal_weights(module):
                parallel = self._user_parallelize_fn(module, mesh)
            self._check_sharded(module)
            self._compare_branches(module, installed)
        with self.precision.forward_context():
            self._log_layout(installed)
        if isinstance(parallel, nn.Module):  # Lightning refuses anything else
            self.watch_trained(parallel)
        return parallel


class _SyncControl(ParallelBackwardSyncControl):
    """Switch gradient averaging off. Lightning's class leaves it off after a call with `enabled=False`."""

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return super().no_backward_sync(module, enabled) if enabled else nullcontext()
