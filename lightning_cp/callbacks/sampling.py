"""Draw sample pictures, and log measurements of each step, while Lightning's Trainer trains."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_cp.callbacks.ema import AveragingCallback
from lightning_cp.comm.agree import gather_objects
from lightning_cp.sampling.draw import gather_shares
from lightning_cp.sampling.tiles import tile, write_png
from lightning_cp.training.ema import full_tensor
from lightning_cp.training.modes import evaluating
from lightning_cp.training.ranks import DataShard, TrainerRanks, log_picture, peak_memory_bytes

Sample = Callable[[Any, torch.Generator], Tensor]


class SamplingCallback(AveragingCallback):
    """Write sample pictures during training, drawn on the training mesh with EMA weights.

    The ranks of a context group draw the same samples together; each group draws different samples. The weights are
    the average of this callback (`ema_decay`) or of an `EMACallback` or `WeightAveraging` of the Trainer; without an
    average, the current weights. Training is not affected: random states, training modes and weights are restored.

    Pictures are written to `<name>/step_<n>.png` in the Trainer's log directory, and sent to its TensorBoard and
    W&B loggers. A Trainer can have several of these callbacks, with different names.

    Args:
        sample: function of the LightningModule and a CPU generator. It returns pictures [n, c, h, w] or clips
            [n, c, f, h, w], whole on every rank, with the same n everywhere. The generator is equal in a context group,
            different for each group, and seeded equally at every step.
        every_n_train_steps: number of optimizer steps between pictures.
        at_end: draw after the last step too.
        ema_decay: EMA decay of this callback, see `EMACallback`; None: this callback keeps no average.
        num_samples: number of samples to show, the first ones of all groups in order; None: all.
        value_range: (black, white) values of the samples.
        folder: output folder; None: the Trainer's log directory.
        seed: seed of the generator.
        name: name of the folder, of the picture in loggers, and of this callback's state in checkpoints.
    """

    def __init__(
        self,
        sample: Sample,
        *,
        every_n_train_steps: int,
        at_end: bool = True,
        ema_decay: float | None = None,
        num_samples: int | None = None,
        value_range: tuple[float, float] = (-1.0, 1.0),
        folder: str | Path | None = None,
        seed: int = 0,
        name: str = "samples",
    ) -> None:
        super().__init__("ema_decay", ema_decay)
        if isinstance(every_n_train_steps, bool) or not isinstance(every_n_train_steps, int) or every_n_train_steps < 1:
            raise ValueError(
                f"every_n_train_steps={every_n_train_steps!r} must be an integer of at least 1 (optimizer steps)"
            )
        if len(value_range) != 2 or not value_range[0] < value_range[1]:
            raise ValueError(
                f"value_range={value_range!r} must be (black, white) with black < white, for instance (-1.0, 1.0)"
            )
        self._sample, self._every, self._at_end = sample, every_n_train_steps, at_end
        if num_samples is not None and (isinstance(num_samples, bool) or num_samples < 1):
            raise ValueError(f"num_samples={num_samples!r} must be None or an integer of at least 1")
        self._range, self._folder, self._seed, self._num_samples = value_range, folder, seed, num_samples
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(
                f"name={name!r} must name a folder: letters, digits, '_', '-' and '.', for instance 'samples_wide'"
            )
        self._name = name
        self._drawn = -1  # step of the last picture

    @property
    @override
    def state_key(self) -> str:
        """Name of this callback's state in checkpoints. It is the class for the default name."""
        return super().state_key if self._name == "samples" else f"{super().state_key}[{self._name}]"

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._decay is not None:
            return  # a checkpoint callback, which comes last, must save this callback's average after its update
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        # Run after the EMA callback, which updates the average. A new list: the Trainer iterates over the old one.
        trainer.callbacks = [*(one for one in callbacks if one is not self), self]  # type: ignore[attr-defined]

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        before = self._last_step
        super().on_train_batch_end(trainer, pl_module)
        step = trainer.global_step
        if step != before and step % self._every == 0:
            self._draw(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._at_end and self._drawn != trainer.global_step:
            self._draw(trainer, pl_module)

    def _draw(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._drawn = trainer.global_step
        ranks, data_shard = TrainerRanks(trainer), DataShard.of(trainer.strategy)
        with isolate_rng(), evaluating(pl_module), self.averaged(trainer, pl_module), torch.no_grad():
            generator = torch.Generator().manual_seed(self._seed + data_shard.rank)
            with trainer.precision_plugin.forward_context():
                samples = self._sample(pl_module, generator)
        _check_shapes(samples)
        gathered = gather_shares(ranks, samples.detach().float(), data_shard)[: self._num_samples]
        folder = Path(self._folder or trainer.log_dir or trainer.default_root_dir)  # every rank: log_dir broadcasts
        if trainer.is_global_zero:
            self._write(trainer, tile(gathered, value_range=self._range), folder)

    def _write(self, trainer: Trainer, picture: Tensor, folder: Path) -> None:
        step = trainer.global_step
        write_png(picture, folder / self._name / f"step_{step:08d}.png")
        for logger in trainer.loggers:
            log_picture(logger, self._name, picture.numpy(), step)


def _check_shapes(samples: object) -> None:
    """Compare sample shapes between ranks. Raises, on every rank: ValueError: no pictures, or different shapes."""
    shape = tuple(samples.shape) if isinstance(samples, Tensor) else type(samples).__name__
    shapes = gather_objects(shape, dist.group.WORLD)
    valid = isinstance(shape, tuple) and len(shape) in (4, 5) and shape[1] in (1, 3, 4) and all(shape)
    if len(set(shapes)) > 1 or not valid:
        shapes_by_rank = ", ".join(f"rank {rank}: {one}" for rank, one in enumerate(shapes))
        raise ValueError(
            f"sample(...) returned {shapes_by_rank}: it must return pictures [n, c, h, w] or clips [n, c, f, h, w] "
            "with c = 1, 3 or 4, and the same shape on every rank"
        )


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
