"""Learning-rate schedules by name: diffusers' (`diffusers.optimization.get_scheduler`), as functions of the step alone.

A resumed run therefore needs no saved schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.optim.lr_scheduler import LambdaLR

CONSTANT = "constant"


@dataclass(frozen=True)
class Schedule:
    """A factor of the learning rate for each step: a linear warm-up, and then the named schedule.

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
