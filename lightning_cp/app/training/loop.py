"""What surrounds each step, whichever loop takes it, and what it tells those who watch."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from lightning_cp.app.training.run import Run
from lightning_cp.app.training.tracing import StepTrace
from lightning_cp.checkpoint import latest_checkpoint
from lightning_cp.checkpoint.writer import CheckpointWriter
from lightning_cp.errors import NonFiniteError
from lightning_cp.launch.stopping import Stopped
from lightning_cp.training.ema import whole_of
from lightning_cp.training.finite import StepGuard, advise, find_nonfinite, find_ranks, shorten

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class StepReport:
    """One step, as it is logged.

    Attributes:
        loss: mean over the global batch. grad_norm: before clipping.
        skipped: steps so far whose update was left out, because a loss or gradient was not finite.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    step_time_s: float
    tokens_per_s: float
    skipped: int = 0


class Watcher(Protocol):
    """Is told of every step, on the first rank alone."""

    def watch(self, report: StepReport) -> None:
        """Takes in one step."""
        ...


@dataclass(frozen=True)
class LoopSettings:
    """How long, and how.

    Args:
        max_steps: training ends when so many steps are done, those before a resumption included.
        lr: after the warm-up; the schedule does not depend on `max_steps`, so that a longer run goes on exactly.
        warmup_steps: over which the learning rate rises in a straight line.
        checkpoint_every: steps; one is written after the last step too.
        tokens: of one sample, for tokens/s.
    """

    max_steps: int
    lr: float
    warmup_steps: int
    checkpoint_every: int
    tokens: int

    def lr_at(self, step: int) -> float:
        """The learning rate of the step with this number, counted from 1."""
        return self.lr * min(1.0, step / max(1, self.warmup_steps))


class Steps:
    """What surrounds the optimizer's step: learning rate, clipping, the average, reports, checkpoints, stopping.

    For each step call `begin`, run forward and backward, call `before_update`, let the optimizer step, call `end`.

    Args:
        run: its state moves on with every step.
        settings: of the loop.
        writer: of the run's checkpoints.
        trace: of one of the steps, perhaps.
        guard: decides about steps whose loss or gradient is not finite.
        watchers: told of every step, on the first rank.
        after_step: called after every step, on every rank.
    """

    def __init__(
        self,
        run: Run,
        settings: LoopSettings,
        writer: CheckpointWriter,
        *,
        trace: StepTrace,
        guard: StepGuard,
        watchers: Sequence[Watcher] = (),
        after_step: Callable[[Run], None] | None = None,
    ) -> None:
        self._run, self._settings, self._writer = run, settings, writer
        self._trace, self._guard, self._watchers, self._after_step = trace, guard, watchers, after_step
        self._ended = time.perf_counter()
        self._loss = self._norm = float("nan")
        self._request, self._updates = 0, True

    @property
    def are_done(self) -> bool:
        """Whether `max_steps` is reached."""
        return self._run.state.step >= self._settings.max_steps

    def begin(self) -> None:
        """Before the forward."""
        self._trace.begin(self._run.state.step + 1)
        for group in self._run.state.optimizer.param_groups:
            group["lr"] = self._settings.lr_at(self._run.state.step + 1)

    def before_update(self, loss: Tensor, *, max_norm: float) -> None:
        """Clip the gradients by their norm, or drop them: an optimizer without gradients changes nothing.

        Call it on every rank, after the backward (and after unscaling). Loss, norm and requests to stop are read on the
        host here, all at once: the only synchronisation of a step.

        Args: loss: of this rank.
        Raises: NonFiniteError: loss or gradient is not finite, and the settings say that this is an error.
        """
        run, state = self._run, self._run.state
        parameters = [x for x in state.module.parameters() if x.grad is not None]
        norm = nn.utils.get_total_norm([x.grad for x in parameters if x.grad is not None])
        # Context peers hold the same loss: the mean over ranks is the mean over data. All ranks hold the same norm.
        (self._loss, self._norm), self._request = run.means_and_request(loss, whole_of(norm))
        try:
            self._updates = self._guard.allows_update(self._loss, self._norm)
        except NonFiniteError as error:
            self._fail(f"step {state.step + 1}: {error}{self._where(loss)}", reports=True)
        if self._updates:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        else:
            state.optimizer.zero_grad()

    def end(self) -> None:
        """After the optimizer's step. Call it on every rank.

        Raises:
            Stopped: SIGTERM, SIGINT or SIGUSR1 came to some rank; a checkpoint is written.
            NonFiniteError: weights that should be saved are not finite.
        """
        run, state, number = self._run, self._run.state, self._request
        state.step += 1
        if self._updates:
            state.average.update(state.module, step=state.step)
        else:
            state.skipped += 1
        self._tell()
        self._trace.end()  # what comes now is not done in every step
        saves = bool(number) or self.are_done or state.step % self._settings.checkpoint_every == 0
        if saves:
            self._save()
        if number or self.are_done:
            self._complete()
        if number:
            raise run.stopped(number)
        try:
            if self._after_step is not None:
                self._after_step(run)
        except Stopped as stop:
            if not saves:
                self._save()
            self._complete()
            raise run.stopped(stop.number) from None

    def _save(self) -> None:
        """Save, unless weights are not finite: a checkpoint of those must not take the place of a good one."""
        state = self._run.state
        found = find_nonfinite(state.named_tensors(), self._run.ranks)
        state.is_finite = not found
        if not found:
            self._writer.save(state.snapshot(shards=self._writer.takes_shards))
            return
        message = f"after step {state.step} weights are not finite and are not saved: {shorten(found)}"
        if self._guard.on_nonfinite != "ignore":
            self._fail(message)
        if self._run.is_first:
            print(f"warning: {message}", file=sys.stderr, flush=True)

    def _fail(self, message: str, *, reports: bool = False) -> None:
        """Raise NonFiniteError with what can be done. Args: reports: whether the step is not reported yet."""
        if reports:
            self._run.state.step += 1
            self._tell()
        self._writer.wait()
        raise NonFiniteError(f"{message}. {advise(latest_checkpoint(self._run.folder.path))}") from None

    def _where(self, loss: Tensor) -> str:
        """The ranks whose loss is not finite, else the parameters whose gradient is not. Call it on every rank."""
        run = self._run
        if not math.isfinite(self._loss):
            return find_ranks(loss, run.ranks)
        named = ((n, [] if x.grad is None else [x.grad]) for n, x in run.state.module.named_parameters())
        found = find_nonfinite(named, run.ranks)
        return f", of {shorten(found)}" if found else ", because finite gradients are too large for it"

    def _complete(self) -> None:
        self._writer.wait()
        self._run.ranks.barrier()  # whoever goes on finds it

    def _tell(self) -> None:
        state, before = self._run.state, self._ended
        self._ended = time.perf_counter()
        seconds = self._ended - before
        tokens = state.sampler.batch_size * self._settings.tokens
        rate = self._settings.lr_at(state.step)
        report = StepReport(state.step, self._loss, rate, self._norm, seconds, tokens / seconds, state.skipped)
        for watcher in self._watchers if self._run.is_first else ():
            watcher.watch(report)
