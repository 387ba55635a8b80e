"""Log the measurements of each step with Lightning's Trainer."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cp.training.ema import full_tensor
from lightning_cp.training.memory import peak_memory_bytes


class StepMetrics(Callback):
    """Log the measurements that `lightning-cp train` writes to metrics.csv, to the loggers of the Trainer.

    "grad_norm" is the norm of the gradient before clipping, also of sharded gradients; "step_time_s" the time since the
    end of the last step; "peak_memory_gib" the peak memory of rank 0. A step is an optimizer step: with
    `accumulate_grad_batches` above 1 it has several batches of the loader.

    Args: tokens: tokens of a step, of all ranks and accumulated batches, to log "tokens_per_s"; None: not logged.
    Raises: ValueError: `tokens` is not positive.
    """

    def __init__(self, tokens: float | None = None) -> None:
        if tokens is not None and not tokens > 0:
            raise ValueError(f"tokens={tokens!r} must be None or more than 0: the tokens of a step")
        self._tokens = tokens
        self._ended, self._steps, self._batches = time.perf_counter(), 0, 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_step(trainer)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Log the norm of the gradient. Ranks: all, because shards are reduced."""
        gradients = [x.grad for x in pl_module.parameters() if x.grad is not None]
        pl_module.log("grad_norm", full_tensor(nn.utils.get_total_norm(gradients)))

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._batches += 1
        if trainer.global_step == self._steps:
            return  # its gradient is accumulated
        seconds = time.perf_counter() - self._ended
        values = {"step_time_s": seconds, "peak_memory_gib": peak_memory_bytes(trainer.strategy.root_device) / 2**30}
        if self._tokens is not None:
            # The last step of an epoch may have fewer batches.
            fraction = min(1.0, self._batches / trainer.accumulate_grad_batches)
            values["tokens_per_s"] = self._tokens * fraction / seconds
        pl_module.log_dict(values)
        self._start_step(trainer)

    def _start_step(self, trainer: Trainer) -> None:
        self._ended, self._steps, self._batches = time.perf_counter(), trainer.global_step, 0
