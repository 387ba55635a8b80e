"""Count the transformer calls of a denoising step, to distinguish branches of guidance without names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_cp.errors import GuidanceError
from lightning_cp.pipelines.lazy_tensor import resolve_all


@dataclass(eq=False)
class StepClock:
    """Count the transformer calls of one denoising step. Their index distinguishes the branches of guidance.

    Attributes:
        calls: calls of each transformer in this step that have no cache context.
        before: their number in the previous step with calls.
        resolves: True if the scheduler gets real tensors, because a callback after its step may read them.
        must_be_equal: True if each step must have the same number of calls, because branches keep keys between steps.
        branches: number of branches of guidance so far, over all transformers.
    """

    calls: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    resolves: bool = True
    must_be_equal: bool = True
    branches: int = 0

    def next_call(self, module: nn.Module) -> int:
        """Return the index of the next call of a transformer in this step."""
        index = self.calls.get(id(module), 0)
        self.calls[id(module)] = index + 1
        return index

    def this_call(self, module: nn.Module) -> int:
        """Return the index of the current call of a transformer in this step."""
        return self.calls[id(module)] - 1

    def next_branch(self) -> int:
        """Return the index of the next branch of guidance, over all transformers."""
        self.branches += 1
        return self.branches - 1

    def end_step(self) -> None:
        """End the step.

        Raises: GuidanceError: a transformer had another number of calls in the step before, and it must be equal.
        """
        for module, calls in self.calls.items():
            known = self.before.setdefault(module, calls)
            if known != calls and self.must_be_equal:
                raise GuidanceError(
                    f"this pipeline calls its transformer {calls} times in this step and {known} times before, without "
                    "naming the branches of guidance (cache_context), so their keys cannot be distinguished: "
                    "use patches=1, or guidance in all steps"
                )
        self.calls = {}

    def before_step(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrap the scheduler's `step`, which ends a denoising step."""
        self.end_step()
        return call(*resolve_all(args), **resolve_all(kwargs)) if self.resolves else call(*args, **kwargs)

    def reset(self) -> None:
        """Forget all steps, before a call of the pipeline."""
        self.calls, self.before, self.branches = {}, {}, 0
