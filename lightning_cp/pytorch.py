"""Context parallelism for Lightning's `Trainer`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ThroughputMonitor, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies.ddp import DDPStrategy
from lightning.pytorch.strategies.model_parallel import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cp.compat.check import TRAINER_SETUP, check_unchanged
from lightning_cp.compat.fabric_names import keeping_optimizers_without_state, optimizers_to_device
from lightning_cp.engine.meta import weights_on_meta
from lightning_cp.strategies.auto_degrees import Example
from lightning_cp.strategies.ddp import DDPMixin, build_ddp_buckets
from lightning_cp.strategies.fsdp import FSDPMixin
from lightning_cp.strategies.sample_counts import is_world, measure_once, sum_once
from lightning_cp.strategies.trainer import (
    KeepsRandomStates,
    MultiProcessingLauncher,
    ScriptLauncher,
    SharesLateWeights,
    batches_taken,
    keep_samplers,
)

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class _TrainerMixin(SharesLateWeights, KeepsRandomStates):
    """Common base of both strategies for the Trainer."""

    _process_launcher = MultiProcessingLauncher
    _script_launcher = ScriptLauncher

    @staticmethod
    def _planner(example: Example) -> Any:
        from lightning_cp.planning.degrees import plan_example  # not needed with given degrees

        return plan_example(example)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the data groups, or over the ranks of `group`; see `sum_once`."""
        reduced = super().reduce(tensor, group, reduce_op)  # type: ignore[misc]
        return sum_once(reduced, reduce_op, self.context.step_groups) if is_world(group) else reduced

    def _adapt(self, trainer: Trainer) -> None:
        """Adapt what divides data over ranks or counts ranks, in a Trainer: samplers and throughput monitors."""
        self._shards_batch_samplers = keep_samplers(trainer, data_size=self.data_size)
        self._batches_taken = partial(batches_taken, trainer)
        if self.context.groups is not None:
            callbacks: list[object] = trainer.callbacks  # type: ignore[attr-defined]
            monitors = [one for one in callbacks if isinstance(one, ThroughputMonitor)]
            measure_once((each for one in monitors for each in one._throughputs.values()), self.context.groups)

    def backward(self, *args: Any, **settings: Any) -> Any:
        """Run a backward. Raises: ValueError: see `ContextParallelMixin`; the loss does not use a trained parameter."""
        loss = super().backward(*args, **settings)
        if self._lightning.lightning_module.automatic_optimization:  # otherwise, further backwards may follow
            self._check_reduced()
        return loss

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizers.

        Raises:
            PeerMismatchError: they have other settings on another rank.
            ValueError: one does not take sharded weights.
        """
        super().setup_optimizers(trainer)  # type: ignore[misc]
        self.check_optimizers(self._lightning.optimizers)
        self._agreement.add_optimizers(self._lightning.optimizers)


class ContextParallelStrategy(_TrainerMixin, DDPMixin, DDPStrategy):
    """Context parallelism with DDP for the transformers of a LightningModule.

    Example: `Trainer(strategy=ContextParallelStrategy(ring=2))`. Args: see `DDPMixin`.
    """

    @override
    def setup(self, trainer: Trainer) -> None:
        """Make the module's transformers context-parallel, then run Lightning's setup."""
        assert self.lightning_module is not None, "connected before"
        self._adapt(trainer)
        installed = self._wrap(self.lightning_module)
        with self._from_equal_weights(self.lightning_module):
            pass
        super().setup(trainer)
        with self.precision_plugin.forward_context():
            self._log_layout(installed)

    @override
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        self._leave_in_host(model)
        ddp = build_ddp_buckets(super()._setup_model(model))
        self.watch_trained(ddp)
        return ddp

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint as Lightning does; it can run code only with `weights_only=False`.

        Raises: CheckpointError: see `DDPMixin._check_checkpoint`.
        """
        return super().load_checkpoint(checkpoint_path, self._check_checkpoint(checkpoint_path, weights_only))


class ContextParallelFSDPStrategy(_TrainerMixin, FSDPMixin, ModelParallelStrategy):
    """Context parallelism with FSDP2: weights are sharded over all ranks, block by block, after `configure_model`.

    Args: see `FSDPMixin`.
    """

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Lightning's context; with `empty_init`, weights are on the meta device and buffers have storage."""
        with weights_on_meta() if empty_init else nullcontext(), super().tensor_init_context(empty_init=False):
            yield

    @override
    @torch.inference_mode(mode=False)  # sharded weights cannot be moved in inference mode
    def setup(self, trainer: Trainer) -> None:
        """Make the module's transformers context-parallel, shard its weights, then set up as Lightning does."""
        # Replaces ModelParallelStrategy.setup, which requires a configure_model that shards the weights.
        assert self.accelerator is not None, "chosen by the Trainer"
        assert self.lightning_module is not None, "connected before"
        assert self.model is not None, "connected before"
        check_unchanged(ModelParallelStrategy.setup, TRAINER_SETUP)
        self.accelerator.setup(trainer)
        self._refuse_what_needs_whole_weights(trainer)
        self._adapt(trainer)
        if any(isinstance(inner, FullyShardedDataParallel) for inner in self.model.modules()):
            raise TypeError(
                f"found modules wrapped in FullyShardedDataParallel: {type(self).__name__} only supports the new FSDP2 "
                "APIs in PyTorch >= 2.4; leave the module as it is, or use fully_shard"
            )
        installed = self._wrap(self.lightning_module)
        self._shard_weights(self.lightning_module, installed, steps=_STEPS)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.watch_trained(self.model)
        self.barrier()
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fits:
            optimizers_to_device(self.optimizers, self.root_device)
        with self.precision_plugin.forward_context():
            self._log_layout(installed)

    def _refuse_what_needs_whole_weights(self, trainer: Trainer) -> None:
        """Check callbacks and plugins. Raises: ValueError: one would fail later or have no effect."""
        callbacks: list[object] = trainer.callbacks if trainer.state.fn == TrainerFn.FITTING else []  # type: ignore[attr-defined]
        averaging = [type(one).__name__ for one in callbacks if isinstance(one, WeightAveraging)]
        if averaging:
            raise ValueError(
                f"{averaging[0]} cannot average sharded weights: use EMACallback(decay=...) of lightning_cp.callbacks"
            )
        if self._save_distributed_checkpoint and isinstance(self.checkpoint_io, AsyncCheckpointIO):
            raise ValueError(
                "AsyncCheckpointIO needs save_distributed_checkpoint=False: checkpoints with one file per rank are "
                "written synchronously"
            )

    @override
    @torch.inference_mode(mode=False)
    def load_checkpoint(  # type: ignore[override]  # Fabric names it `path`
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint; optimizers are loaded only when fitting. See `FSDPMixin.load_checkpoint`."""
        assert self.lightning_module is not None, "connected before"
        optimizers = self.optimizers
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            self.optimizers = []
        try:
            loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
            return loaded
        finally:
            self.optimizers = optimizers

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer to save, by names of parameters; the optimizer is not changed.

        With save_distributed_checkpoint=False, tensors are whole, on the CPU of rank 0. Lightning's method would number
        the parameters in the order of the module, and sort them in each group.
        """
        assert self.model is not None, "set up before"
        bare = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        options = StateDictOptions(full_state_dict=not self._save_distributed_checkpoint, cpu_offload=True)
        with keeping_optimizers_without_state():
            return get_optimizer_state_dict(self.model, bare, options=options)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, *args: Any, **settings: Any) -> None:
        """Save a checkpoint as Lightning does; an older one at this path is kept until the new one is complete."""
        replaces_folder = self.broadcast(Path(filepath).is_dir())
        if replaces_folder and isinstance(self.checkpoint_io, AsyncCheckpointIO):
            raise IsADirectoryError(f"{filepath} is a folder, which AsyncCheckpointIO cannot replace: use another path")
        # Lightning writes a single file, possibly asynchronously. On every rank, it would first remove a folder.
        if not self._save_distributed_checkpoint and not replaces_folder:
            super().save_checkpoint(checkpoint, filepath, *args, **settings)
            return
        with self._all_or_nothing(filepath) as scratch:
            super().save_checkpoint(checkpoint, scratch, *args, **settings)
