"""The training loop, and what it tells those who watch it."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_cp.launch.stopping import ASKING, Stopped, StopRequest
from lightning_cp.training.flow import FlowMatching
from lightning_cp.training.state import TrainState

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
        max_steps: the loop ends when so many steps are done, those before a resumption included.
        lr: after the warm-up; the schedule does not depend on `max_steps`, so that a longer run goes on exactly.
        warmup_steps: over which the learning rate rises in a straight line.
        clip_norm: of the gradient.
        checkpoint_every: steps; one is written after the last step too.
        keep_checkpoints: the newest so many.
        tokens: of one sample, for tokens/s.
    """

    max_steps: int
    lr: float
    warmup_steps: int
    clip_norm: float
    checkpoint_every: int
    keep_checkpoints: int
    tokens: int

    def lr_at(self, step: int) -> float:
        """The learning rate of the step with this number, counted from 1."""
        return self.lr * min(1.0, step / max(1, self.warmup_steps))


def fit(
    fabric: Fabric,
    state: TrainState,
    flow: FlowMatching,
    loader: DataLoader[Batch],
    *,
    settings: LoopSettings,
    checkpoints: Path,
    watchers: Sequence[Watcher] = (),
    after_step: Callable[[int], None] | None = None,
) -> None:
    """Trains from `state.step` to `settings.max_steps`, writing checkpoints on the way.

    Args:
        fabric: launched.
        state: moves on with every step.
        flow: the objective.
        loader: batches of this data rank, in the order of `state.sampler`.
        settings: of the loop.
        checkpoints: folder to write to, on the first rank.
        watchers: told of every step, on the first rank.
        after_step: called with the number of steps done, on every rank.
    Raises: Stopped: SIGTERM or SIGUSR1 came to some rank; the step was finished and a checkpoint written.
    """
    state.model.train()
    started = time.perf_counter()
    with StopRequest() as request:
        for data in _batches(loader, state, settings.max_steps):
            report, number = _step(fabric, state, flow, data, settings, request)
            now = time.perf_counter()
            report, started = _timed(report, now - started, state.sampler.batch_size * settings.tokens), now
            if fabric.is_global_zero:
                for watcher in watchers:
                    watcher.watch(report)
            if after_step is not None:
                after_step(state.step)
            is_last = state.step == settings.max_steps
            if number or is_last or state.step % settings.checkpoint_every == 0:
                if fabric.is_global_zero:
                    state.save(checkpoints, keep=settings.keep_checkpoints)
                fabric.barrier()
            if number and not is_last:
                name = signal.Signals(number).name
                raise Stopped(
                    f"stopped by {name} after step {state.step}, with a checkpoint: go on with resume=last", number
                )


def _step(
    fabric: Fabric,
    state: TrainState,
    flow: FlowMatching,
    data: Batch,
    settings: LoopSettings,
    request: StopRequest,
) -> tuple[StepReport, int]:
    """One step. Returns: its report, and the signal that asks any rank to stop (0: none)."""
    lr = settings.lr_at(state.step + 1)
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    batch = flow.batch(*data, step=state.step, first_index=state.sampler.first_index)
    loss = flow.loss(state.model, batch)
    fabric.backward(loss)
    norm = fabric.clip_gradients(state.model, state.optimizer, max_norm=settings.clip_norm, error_if_nonfinite=False)
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.step += 1
    state.average.update(state.module, step=state.step)
    # Context peers hold the same loss: the mean over data. All ranks learn of a request in the same step.
    asked = torch.tensor([float(request.number == number) for number in ASKING], dtype=torch.float64)
    told = fabric.all_reduce(torch.cat([loss.detach().double().view(1), asked.to(loss.device)]), reduce_op="mean")
    assert isinstance(told, Tensor), "a tensor is reduced to a tensor"
    mean, *asking = told.tolist()
    number = next((number for number, share in zip(ASKING, asking, strict=True) if share), 0)
    return StepReport(state.step, mean, lr, float(norm) if norm is not None else float("nan"), 0.0, 0.0), number


def _timed(report: StepReport, step_time_s: float, tokens: int) -> StepReport:
    return StepReport(report.step, report.loss, report.lr, report.grad_norm, step_time_s, tokens / step_time_s)


def _batches(loader: DataLoader[Batch], state: TrainState, max_steps: int) -> Iterator[Batch]:
    while state.step < max_steps:
        state.sampler.seek(state.step)
        for data in loader:
            yield data
            if state.step >= max_steps:
                return
