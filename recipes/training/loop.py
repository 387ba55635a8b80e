"""Do the work around each optimizer step, with Fabric and the Trainer: schedule, clipping, EMA, trace, reports."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.profiler import profile

from lightning_cp.checkpoint import latest_checkpoint
from lightning_cp.checkpoint.store import CheckpointWriter
from lightning_cp.comm.stats import traced
from lightning_cp.errors import NonFiniteError
from lightning_cp.files import writing_new
from lightning_cp.launch.channel import Stopped
from lightning_cp.recipes.training.run import Run
from lightning_cp.training.ema import full_tensor
from lightning_cp.training.finite import StepGuard, advise, find_nonfinite, find_ranks, shorten
from lightning_cp.training.ranks import peak_memory_bytes


@dataclass
class StepTrace:
    """Record one step from `begin` to `end`; every rank writes a file for chrome://tracing or Perfetto.

    The next step's reported time includes writing the file.

    Args:
        step: step to record, counted from 1; None: record no step.
        path: path of this rank's trace file.
    """

    step: int | None
    path: Path
    _found: profile | None = field(default=None, init=False)
    _recording: ExitStack = field(default_factory=ExitStack, init=False)

    def begin(self, step: int) -> None:
        """Start recording if `step` is the chosen one. Call it before the forward."""
        if step == self.step:
            self._found = self._recording.enter_context(traced())

    def end(self) -> None:
        """Write the trace file if this step was recorded. Call it after the step."""
        if self._found is None:
            return
        self._recording.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with writing_new(self.path) as path:
            self._found.export_chrome_trace(str(path))
        self._found = None


CONSTANT = "constant"


@dataclass(frozen=True)
class Schedule:
    """A factor of the learning rate for each step: a linear warm-up, and then one of diffusers' schedules.

    It depends on the step alone, so a resumed run needs no saved schedule.

    Args:
        name: "constant", "linear", "cosine", "cosine_with_restarts" or "polynomial".
        warmup_steps: number of steps of the warm-up.
        steps: step at which the schedule ends; its last factor is kept afterwards. Not used by "constant".
        cycles: number of cycles of "cosine_with_restarts".
    """

    name: str = CONSTANT
    warmup_steps: int = 0
    steps: int = 0
    cycles: int = 1

    def factor(self, step: int) -> float:
        """Return the factor of a step. Args: step: step number, counted from 1."""
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        if self.name == CONSTANT:
            return 1.0
        done = max(self.warmup_steps, min(step, self.steps) - 1)  # steps before this one
        return float(self._diffusers.lr_lambdas[0](done))

    @cached_property
    def _diffusers(self) -> LambdaLR:
        from diffusers.optimization import get_scheduler

        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        schedule: LambdaLR = get_scheduler(
            self.name,
            optimizer,
            num_warmup_steps=self.warmup_steps,
            num_training_steps=max(self.steps, self.warmup_steps + 1),
            num_cycles=self.cycles,
        )
        return schedule


@dataclass(frozen=True)
class StepReport:
    """The logged values of one step.

    Attributes:
        loss: mean over the global batch. grad_norm: gradient norm before clipping.
        skipped: number of updates skipped so far because a loss or gradient was not finite.
        val_loss: validation loss after this step; NaN if it was not validated.
        sigma: mean sigma of the global batch; 1 is pure noise.
        peak_memory_gib: peak memory of the first rank so far: GPU memory, or on the CPU that of its process.
        expert: number of the trained expert in `model.component`, from 1; NaN without experts.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    step_time_s: float
    tokens_per_s: float
    skipped: int = 0
    val_loss: float = math.nan
    sigma: float = math.nan
    peak_memory_gib: float = math.nan
    expert: float = math.nan


class Watcher(Protocol):
    """Receive the report of every step, on the first rank only."""

    def watch(self, report: StepReport) -> None:
        """Process the report of one step."""
        ...


class Steps:
    """Everything around the optimizer step: learning rate, clipping, EMA, reports, checkpoints, stop requests.

    For each step: call `begin`, then `add` and the backward for each micro-batch, then `before_update`, the
    optimizer's step and `end`.

    Args:
        run: the run; its state is updated at every step.
        config: the run's settings, of which `max_steps`, `checkpoint_every` and `save_every` are read.
        writer: writes the run's checkpoints.
        schedule: factor of the learning rate of each parameter group by step.
        tokens: tokens per sample, for tokens/s.
        trace: profiler trace of one step; may be disabled.
        guard: handles steps with a non-finite loss or gradient.
        watchers: called with the report of every step, on the first rank.
        validate: called after every step, on every rank; returns the validation loss if it is due.
        export: writes the trained weights, on every rank, every `save_every` steps and when the run is stopped.
        after_step: called after every step, on every rank.
    """

    def __init__(
        self,
        run: Run,
        config: DictConfig,
        writer: CheckpointWriter,
        *,
        schedule: Schedule,
        tokens: int,
        trace: StepTrace,
        guard: StepGuard,
        watchers: Sequence[Watcher] = (),
        validate: Callable[[Run], float | None] = lambda _: None,
        export: Callable[[Run], None] = lambda _: None,
        after_step: Callable[[Run], None] | None = None,
    ) -> None:
        self._run, self._writer = run, writer
        self._max_steps: int = config.max_steps
        self._checkpoint_every, self._save_every = config.checkpoint_every, config.get("save_every")
        self._schedule, self._tokens = schedule, tokens
        self._trace, self._guard, self._watchers = trace, guard, watchers
        self._validate, self._export, self._after_step = validate, export, after_step
        self._groups = run.state.optimizer.param_groups
        self._rates = [float(group["lr"]) for group in self._groups]  # each group's own
        self._ended = time.perf_counter()
        self._loss = self._norm = self._sigma = float("nan")
        self._sums: list[Tensor] = []  # loss and sigma of this rank's micro-batches so far
        self._request, self._updates = 0, True

    @property
    def are_done(self) -> bool:
        """Return True once `max_steps` is reached."""
        return self._run.state.step >= self._max_steps

    def begin(self) -> None:
        """Set the learning rate and start the trace. Call it before the forward."""
        self._trace.begin(self._run.state.step + 1)
        factor = self._schedule.factor(self._run.state.step + 1)
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self._sums = []

    def add(self, loss: Tensor, sigma: Tensor) -> Tensor:
        """Add the loss and mean sigma of a micro-batch to what is reported. Returns: the loss, for its backward."""
        values = (loss, sigma)
        sums = self._sums or [torch.zeros_like(x) for x in values]
        self._sums = [total + x.detach() for total, x in zip(sums, values, strict=True)]
        return loss

    def before_update(self, *, max_norm: float) -> None:
        """Clip the gradients by norm, or drop them to skip the update (an optimizer without gradients does nothing).

        Call it on every rank, after the backward (and after unscaling). Loss, norm and stop requests are read on the
        host together, here: the only host synchronisation of a step.

        Args: max_norm: largest allowed gradient norm.
        Raises: NonFiniteError: loss or gradient is not finite, and the settings make this an error.
        """
        run, state = self._run, self._run.state
        parameters = [x for x in state.module.parameters() if x.grad is not None]
        norm = nn.utils.get_total_norm([x.grad for x in parameters if x.grad is not None])
        # Ranks of a context group have the same loss, so the mean over ranks is the mean over data. All ranks have the
        # same norm.
        loss, sigma = self._sums
        means, self._request = run.means_and_request(loss, full_tensor(norm), sigma)
        self._loss, self._norm, self._sigma = means
        try:
            self._updates = self._guard.allows_update(self._loss, self._norm)
        except NonFiniteError as error:
            self._fail(f"step {state.step + 1}: {error}{self._locate_nonfinite(loss)}", reports=True)
        if self._updates:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        else:
            state.optimizer.zero_grad()

    def end(self) -> None:
        """Update the EMA, report the step and save checkpoints. Call it after the optimizer step, on every rank.

        Raises:
            Stopped: a rank received SIGTERM, SIGINT or SIGUSR1; a checkpoint has been written, and with `save_every`
                also an export.
            NonFiniteError: the weights to be saved are not finite.
        """
        run, state, number = self._run, self._run.state, self._request
        state.step += 1
        if self._updates:
            state.average.update(state.module, step=state.step, without=getattr(state.module, "idle", ()))
        else:
            state.skipped += 1
        self._report()
        self._trace.end()  # the trace leaves out what follows: it does not run in every step
        every = self._save_every
        saves = bool(number) or self.are_done or state.step % self._checkpoint_every == 0
        exports = every is not None and (bool(number) or state.step % every == 0)
        self._save(checkpoint=saves, export=exports)
        if number or self.are_done:
            self._complete()
        if number:
            raise run.stopped(number)
        try:
            if self._after_step is not None:
                self._after_step(run)
        except Stopped as stop:
            self._save(checkpoint=not saves, export=every is not None and not exports)
            self._complete()
            raise run.stopped(stop.number) from None

    def _save(self, *, checkpoint: bool, export: bool) -> None:
        """Save a checkpoint, an export or both if the weights are finite: NaNs must not replace good weights."""
        if not (checkpoint or export):
            return
        state = self._run.state
        nonfinite = find_nonfinite(state.named_tensors(), self._run.ranks)
        state.is_finite = not nonfinite
        if not nonfinite:
            if checkpoint:
                self._writer.save(state.snapshot())
            if export:
                self._export(self._run)
            return
        message = f"after step {state.step} weights are not finite and are not saved: {shorten(nonfinite)}"
        if self._guard.on_nonfinite != "ignore":
            self._fail(message)
        if self._run.is_first:
            print(f"warning: {message}", file=sys.stderr, flush=True)

    def _fail(self, message: str, *, reports: bool = False) -> None:
        """Raise NonFiniteError with advice. Args: reports: also report the step, which is not reported yet."""
        if reports:
            self._run.state.step += 1
            self._report()
        self._writer.wait()
        raise NonFiniteError(f"{message}. {advise(latest_checkpoint(self._run.folder))}") from None

    def _locate_nonfinite(self, loss: Tensor) -> str:
        """Name the ranks with a non-finite loss or, if there are none, the parameters with a non-finite gradient.

        Call it on every rank.
        """
        run = self._run
        if not math.isfinite(self._loss):
            return find_ranks(loss, run.ranks)
        gradients = ((n, [] if x.grad is None else [x.grad]) for n, x in run.state.module.named_parameters())
        nonfinite = find_nonfinite(gradients, run.ranks)
        return f", of {shorten(nonfinite)}" if nonfinite else ", because finite gradients are too large for it"

    def _complete(self) -> None:
        self._writer.wait()
        self._run.ranks.barrier()  # afterwards the checkpoint is visible to every rank

    def _report(self) -> None:
        state, before = self._run.state, self._ended
        self._ended = time.perf_counter()
        seconds = self._ended - before
        tokens = state.sampler.batch_size * self._tokens
        rate = self._groups[0]["lr"]
        measured_loss = self._validate(self._run)
        val_loss = math.nan if measured_loss is None else measured_loss
        report = StepReport(
            state.step,
            self._loss,
            rate,
            self._norm,
            seconds,
            tokens / seconds,
            skipped=state.skipped,
            val_loss=val_loss,
            sigma=self._sigma,
            peak_memory_gib=peak_memory_bytes(self._run.ranks.device) / 2**30,
            expert=getattr(state.module, "active_number", math.nan),
        )
        for watcher in self._watchers if self._run.is_first else ():
            watcher.watch(report)
        if measured_loss is not None:
            self._ended = time.perf_counter()  # validation is no part of the next step
