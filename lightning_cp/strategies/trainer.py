"""Parts of the strategies for the Trainer alone: random states in checkpoints, samplers, late weights, launchers."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_cp.checkpoint import CheckpointError
from lightning_cp.comm.agree import gather_objects
from lightning_cp.compat import trainer_names
from lightning_cp.compat.trainer_names import WorkerOutput
from lightning_cp.data.peer_batches import is_custom
from lightning_cp.data.random_state import random_states, restore_random_states
from lightning_cp.strategies.initial_weights import share_initial_weights
from lightning_cp.strategies.launchers import StartsProcesses
from lightning_cp.strategies.mixin import ContextParallelMixin
from lightning_cp.strategies.sweep_ranks import StartsScripts
from lightning_cp.training.ema import full_tensor

_KEY = "lightning_cp_random_states"
_AFTER_FIT_START = "run-stage"  # name of the Trainer's barrier between on_fit_start and on_train_start


class KeepsRandomStates(ContextParallelMixin):
    """Save the random states of each data group with the optimizer states, and restore them when a fit resumes.

    Data groups draw different numbers from the start of a fit or an evaluation: until then, user code may divide data
    at random, with the seed that all ranks have. A checkpoint's states are set before the resumed fit begins. In a fit
    resumed within an epoch they are set again before the first batch, because data loading also draws numbers:
    `training_step` then draws the same numbers as without the break.
    """

    _resumed: dict[str, Any] | None = None

    @override
    def save_checkpoint(self, checkpoint: Any, filepath: Any, *args: Any, **settings: Any) -> None:
        """Save a checkpoint as Lightning does; add the random states of each data group if it has optimizer states."""
        if "optimizer_states" in checkpoint and self.context.groups is not None:
            progress = self._lightning.lightning_module.trainer.fit_loop.epoch_loop.batch_progress
            states = random_states(self.data_rank, self.data_size)
            checkpoint[_KEY] = {"groups": states, "mid_epoch": not progress.is_last_batch}
        super().save_checkpoint(checkpoint, filepath, *args, **settings)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **settings: Any) -> dict[str, Any]:
        """Load a checkpoint as Lightning does; a fit also restores its random states.

        Raises: CheckpointError: its random states are damaged.
        """
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **settings)  # type: ignore[misc]
        if self._lightning.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._resumed = loaded.get(_KEY)
            self._restore()
        return loaded

    @override
    def _share_random_state(self) -> None:
        super()._share_random_state()
        self._restore()

    def on_train_start(self) -> None:
        """Let data groups draw different noise. (Lightning's strategies do nothing at these starts.)"""
        self._separate_random_states()

    on_validation_start = on_test_start = on_predict_start = on_train_start

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Set the random states of a checkpoint that was saved within an epoch, before the first batch."""
        if self._resumed is not None and self._resumed.get("mid_epoch"):
            self._restore()
        self._resumed = None
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]

    def _restore(self) -> None:
        if self._resumed is None or self.context.groups is None:
            return
        try:
            restore_random_states(self._resumed["groups"], self.data_rank, self.data_size)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise CheckpointError(f"the checkpoint's {_KEY} are damaged: {error}") from error


class _RequiresSampler:
    """Replacement of Lightning's method that decides whether a loader gets a distributed sampler."""

    def __init__(self, original: Any, data_size: int) -> None:
        self.original, self.data_size = original, data_size

    def __call__(self, dataloader: DataLoader[Any]) -> bool:
        return self.data_size > 1 and not is_custom(dataloader.batch_sampler) and bool(self.original(dataloader))


def keep_samplers(trainer: Trainer, *, data_size: int) -> bool:
    """Keep the user's samplers with one data group, and batch samplers that Lightning cannot divide with several.

    With a distributed sampler, the Trainer would shuffle training data even if the user sets `shuffle=False`.

    Returns: whether the Trainer divides data (`use_distributed_sampler`).
    """
    connector: Any = trainer._data_connector
    original = connector._requires_distributed_sampler
    if isinstance(original, _RequiresSampler):
        original = original.original
    connector._requires_distributed_sampler = _RequiresSampler(original, data_size)
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def batches_taken(trainer: Trainer, length: int) -> int:
    """Return the number of batches that the Trainer's current loop takes from a loader of this length."""
    stage = trainer.state.stage
    limit = getattr(trainer, f"limit_{stage.dataloader_prefix}_batches") if stage is not None else 1.0
    if trainer.sanity_checking:
        length = int(min(length, trainer.num_sanity_val_steps))
    return int(length * limit) if isinstance(limit, float) else min(length, limit)


class SharesLateWeights(ContextParallelMixin):
    """Share rank 0's weights again after `on_fit_start` and after `on_train_start`.

    Modules that callbacks hold are shared too: averages such as `WeightAveraging`, and frozen copies of the weights.
    """

    def barrier(self, name: Any = None, *args: Any, **settings: Any) -> None:
        """Wait for all ranks. The Trainer's barrier before a fit also shares weights."""
        super().barrier(name, *args, **settings)  # type: ignore[misc]
        if name == _AFTER_FIT_START:
            self._share_late_weights()

    def on_train_start(self) -> None:
        """Share weights that a hook has loaded in `on_train_start`."""
        super().on_train_start()  # type: ignore[misc]
        self._share_late_weights()

    def _share_late_weights(self) -> None:
        module = self._lightning.lightning_module
        fits = module.trainer.state.fn == TrainerFn.FITTING
        if fits and dist.is_initialized() and dist.get_world_size() > 1:
            share_initial_weights(module, self._lightning.root_device)
            share_initial_weights(_ModulesOfCallbacks(module), self._lightning.root_device)


class _ModulesOfCallbacks(nn.Module):
    """Modules that are attributes of callbacks on every rank, without those in the LightningModule.

    Ranks: the whole world.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        inside = set(module.modules())
        modules = {
            f"{index}_{type(callback).__name__}_{name}": value
            for index, callback in enumerate(module.trainer.callbacks)
            for name, value in vars(callback).items()
            if isinstance(value, nn.Module) and value not in inside
        }
        names = gather_objects(list(modules), dist.group.WORLD)
        for name, value in modules.items():
            if all(name in one for one in names):  # a module on one rank only, such as a metric's, is no copy
                self.add_module(name, value)


class MultiProcessingLauncher(StartsProcesses, trainer_names.MultiProcessingLauncher):
    """The Trainer's launcher of processes. It returns sharded weights as whole tensors."""

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> WorkerOutput | None:
        device, is_first = self._strategy.root_device, self._strategy.global_rank == 0

        def gather(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
            for name, x in state.items():
                if isinstance(x, DTensor):  # on the CPU since the end of the fit
                    whole = full_tensor(x.to(device))
                    state[name] = whole.cpu() if is_first else None

        handle = trainer.lightning_module.register_state_dict_post_hook(gather)  # type: ignore[no-untyped-call]
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            handle.remove()


class ScriptLauncher(StartsScripts, trainer_names.SubprocessScriptLauncher):
    """The Trainer's launcher of scripts."""
