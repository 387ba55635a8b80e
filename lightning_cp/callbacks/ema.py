"""EMA weights for Lightning's Trainer, replicated or sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cp.training.ema import WeightAverage, gather_on_first_rank


class AveragingCallback(Callback):
    """Base class of callbacks that keep an EMA of the weights: update, save, load and use it.

    Args:
        setting: name of the decay setting, for error messages.
        decay: EMA decay (weight of the previous average); None: no average.
    Raises: ValueError: the decay is not in [0, 1).
    """

    def __init__(self, setting: str, decay: float | None) -> None:
        is_number = isinstance(decay, (int, float)) and not isinstance(decay, bool)
        if decay is not None and not (is_number and 0 <= decay < 1):
            raise ValueError(f"{setting}={decay!r} must be a number from 0 to below 1, for instance 0.999 (EMA decay)")
        self._setting, self._decay = setting, decay
        self._average: WeightAverage | None = None
        self._averaged: tuple[Trainer, LightningModule] | None = None  # by `_average`
        self._saved: dict[str, Any] | None = None
        self._last_step = 0  # step of the last update

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue the average of the checkpoint, or of this Trainer's last fit of this module.

        Without one, the average starts before the first step.

        Raises: ValueError: another callback averages the weights too, or the checkpoint's averages do not fit.
        """
        if self._saved is not None:
            self._start_average(trainer, pl_module)
        elif self._average is not None and self._averaged != (trainer, pl_module):
            self._average = None
            rank_zero_warn(
                f"{type(self).__name__} starts a new average: its present one is of another Trainer or module. To "
                "continue it, fit the same module with the same Trainer, or resume from a checkpoint with ckpt_path"
            )
        other = averaging_of(trainer, besides=self)
        if self._decay is not None and other is not None:
            raise ValueError(
                f"{type(self).__name__}({self._setting}={self._decay}) and {type(other).__name__} both average the "
                "weights: use one of them"
            )
        self._last_step = trainer.global_step

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Start the average of all weights, or of those that begin to train, from their values before this step."""
        if self._average is None:
            self._start_average(trainer, pl_module)
        else:
            self._average.add_trained(pl_module)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Update the average after an optimizer step, not after a gradient accumulation step."""
        if trainer.global_step != self._last_step and self._average is not None:
            without = tuple(getattr(pl_module, "idle_weights", ()))  # FineTuning, with several experts
            self._average.update(pl_module, step=trainer.global_step, without=without)
        self._last_step = trainer.global_step

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the full averages on the CPU of rank 0. Call it on every rank: shards are all-gathered."""
        if self._average is None:
            return self._saved or {}
        return gather_on_first_rank(self._average.state_dict())

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Drop the average: the checkpoint brings other weights, and its average of them follows if it has one.

        Raises: ValueError: training would go on from the average of a WeightAveraging, which the checkpoint holds as
            the weights.
        """
        is_fit = trainer.state.fn == TrainerFn.FITTING
        if is_fit and "averaging_state" in checkpoint and averaging_of(trainer, besides=self) is None:
            raise ValueError(
                "this checkpoint was written with Lightning's WeightAveraging, and its state_dict holds the averages: "
                f"resume with that callback, not with {type(self).__name__}, or fit from weights without a checkpoint"
            )
        self._average = self._saved = None

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the averages of a checkpoint until a fit or an evaluation starts."""
        self._saved = state_dict or None

    @contextmanager
    def averaged(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
        """Swap the averaged weights into the module inside the context, for example to export them.

        Without an average, the weights are not changed. Ranks: the whole world.
        """
        other = averaging_of(trainer, besides=self) if self._average is None else None
        if isinstance(other, WeightAveraging):
            if not was_updated(other):  # the average is of the initial weights
                yield
                return
            other._swap_models(pl_module)
            try:
                yield
            finally:
                other._swap_models(pl_module)
            return
        average = self._average if other is None else other._average
        with nullcontext() if average is None else average.swapped_in(pl_module):
            yield

    @torch.inference_mode(mode=False)  # an evaluation may start it
    def _start_average(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._decay is None:
            return
        saved = self._saved or {}
        average = WeightAverage(pl_module, self._decay, names=saved)  # saved ones may be unfrozen later
        started = average.state_dict()
        expected = {name: tuple(x.shape) for name, x in started.items()}
        shapes = {name: tuple(x.shape) for name, x in saved.items()}
        different = sorted(name for name, shape in shapes.items() if expected.get(name) != shape)
        if different:
            raise ValueError(
                f"{type(self).__name__}: the EMA weights in the checkpoint do not fit this module: {different[0]} has "
                f"shape {shapes[different[0]]} in the checkpoint and {expected.get(different[0], 'none')} here "
                f"({len(different)} weights differ). Resume with the same module"
            )
        average.load_state_dict({**started, **saved})
        self._average, self._averaged, self._saved = average, (trainer, pl_module), None


class EMACallback(AveragingCallback):
    """Keep an exponential moving average of the trained weights, replicated or sharded.

    Each rank averages its weights: all of them with ContextParallelStrategy, its shards with
    ContextParallelFSDPStrategy. Averages of low-precision weights are float32. Trainer checkpoints hold the averages
    as the callback's state; a resumed run continues them on any number of ranks, and a second `fit` of the same Trainer
    and module too. `fit` and evaluations with `ckpt_path` take the checkpoint's averages. The module keeps the training
    weights; `with callback.averaged(trainer, module): …` swaps the averages in. The average of a weight starts from its
    value before its first step, also if it is unfrozen later; a weight that is frozen later is still averaged.

    Args:
        decay: EMA decay (weight of the previous average), reached gradually: at step n at most (1 + n) / (10 + n).
        evaluate: use the averages in validation, test and predict epochs.
    Raises: ValueError, TypeError: bad settings.
    """

    def __init__(self, decay: float = 0.999, *, evaluate: bool = True) -> None:
        if decay is None:
            raise ValueError("decay=None must be a number from 0 to below 1, for instance 0.999 (EMA decay)")
        if not isinstance(evaluate, bool):
            raise TypeError(f"evaluate={evaluate!r} must be True or False")
        super().__init__("decay", decay)
        self._evaluate = evaluate
        self._swapped = ExitStack()

    @override
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Swap the averages into the module."""
        if self._average is None and self._saved is not None:  # evaluating a checkpoint
            self._start_average(trainer, pl_module)
        if self._evaluate and self._average is not None:
            self._swapped.enter_context(self._average.swapped_in(pl_module))

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the training weights."""
        self._swapped.close()

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the training weights after a failed evaluation."""
        self._swapped.close()


def was_updated(average: WeightAveraging) -> bool:
    """Return True if Lightning's callback has averaged weights: `update_starting_at_step` may be later."""
    model = average._average_model
    return model is not None and int(model.n_averaged) > 0


def averaging_of(trainer: Trainer, *, besides: Callback) -> WeightAveraging | EMACallback | None:
    """Return another callback of the Trainer that averages weights, or None."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for one in callbacks:
        if one is not besides and isinstance(one, (WeightAveraging, EMACallback)):
            return one
    return None
