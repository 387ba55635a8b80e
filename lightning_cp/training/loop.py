"""What surrounds each step, whichever loop takes it, and what it tells those who watch."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lightning_cp.checkpoint.writer import CheckpointWriter
from lightning_cp.launch.stopping import Stopped
from lightning_cp.training.ema import whole_of
from lightning_cp.training.run import Run
from lightning_cp.training.tracing import StepTrace

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class StepReport:
    """One step, as it is logged; `loss` is the mean over the global batch."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    step_time_s: float
    tokens_per_s: float


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
    """Before a step the learning rate; after it the average, the report, the checkpoint, and stopping when asked to.

    Args:
        run: its state moves on with every step.
        settings: of the loop.
        writer: of the run's checkpoints.
        trace: of one of the steps, perhaps.
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
        watchers: Sequence[Watcher] = (),
        after_step: Callable[[Run], None] | None = None,
    ) -> None:
        self._run, self._settings, self._writer = run, settings, writer
        self._trace, self._watchers, self._after_step = trace, watchers, after_step
        self._ended = time.perf_counter()

    @property
    def are_done(self) -> bool:
        """Whether `max_steps` is reached."""
        return self._run.state.step >= self._settings.max_steps

    def begin(self) -> None:
        """Before the forward."""
        self._trace.begin(self._run.state.step + 1)
        for group in self._run.state.optimizer.param_groups:
            group["lr"] = self._settings.lr_at(self._run.state.step + 1)

    def end(self, loss: Tensor, norm: Tensor | None) -> None:
        """After the optimizer's step. Call it on every rank.

        Args:
            loss: of this rank.
            norm: of the gradient, before it was clipped.
        Raises: Stopped: SIGTERM, SIGINT or SIGUSR1 came to some rank; a checkpoint is written.
        """
        run, state = self._run, self._run.state
        state.step += 1
        state.average.update(state.module, step=state.step)
        mean, number = run.mean_and_request(loss)  # context peers hold the same loss: this is the mean over data
        report = self._report(mean, float("nan") if norm is None else float(whole_of(norm)))
        if run.is_first:
            for watcher in self._watchers:
                watcher.watch(report)
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
        except Stopped:
            if not saves:
                self._save()
            self._complete()
            raise

    def _save(self) -> None:
        self._writer.save(self._run.state.snapshot(shards=self._writer.takes_shards))

    def _complete(self) -> None:
        self._writer.wait()
        self._run.ranks.barrier()  # whoever goes on finds it

    def _report(self, loss: float, norm: float) -> StepReport:
        state, before = self._run.state, self._ended
        self._ended = time.perf_counter()
        seconds = self._ended - before
        tokens = state.sampler.batch_size * self._settings.tokens
        return StepReport(state.step, loss, self._settings.lr_at(state.step), norm, seconds, tokens / seconds)
