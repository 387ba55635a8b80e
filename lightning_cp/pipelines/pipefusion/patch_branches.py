"""Branches of guidance of a transformer that is computed in patches: each has keys of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning_cp.engine.installed import Installed
from lightning_cp.pipelines.guidance.step_clock import StepClock
from lightning_cp.pipelines.pipefusion.evaluation import PatchEvaluation
from lightning_cp.undoable import Undo, intercept_method


@dataclass(eq=False)
class PatchBranch:
    """State of one branch of guidance: its buffers, the CFG rank that computes it, and its number of evaluations."""

    evaluation: PatchEvaluation
    owner: int = 0
    done: int = 0


@dataclass(eq=False)
class PatchBranches:
    """The branches of guidance of one transformer.

    Attributes:
        patches: number of patches.
        clock: distinguishes branches without names.
        cfg: number of CFG branches that compute them.
        experts: the branches of other transformers, if each transformer computes some of the steps: when
            a branch of this one begins, their keys are no longer needed.
        known: state of each branch, by its name or index, and by the CFG branch if this is given; forgotten before each
            call of the pipeline.
    """

    installed: Installed
    patches: int
    clock: StepClock
    cfg: int = 1
    experts: list[PatchBranches] = field(default_factory=list)
    known: dict[Any, PatchBranch] = field(default_factory=dict)
    _context: str | None = None

    def follow_names(self) -> list[Undo]:
        """Follow the names that a pipeline gives to the branches (`cache_context`)."""
        module = self.installed.module
        return [intercept_method(module, "cache_context", self._named)] if hasattr(module, "cache_context") else []

    def forget(self) -> None:
        """Forget all branches, and free their keys."""
        self.known, self._context = {}, None
        self.clock.reset()

    def current(self, owner: int | None = None) -> PatchBranch:
        """Return the branch of this call of the transformer. The same CFG branch computes it in all steps.

        Args: owner: the CFG branch that computes the call; None: they take turns.
        """
        context: str | int | None = self._context
        if context is None:  # all shares of a batch are one call
            context = (self.clock.this_call if owner else self.clock.next_call)(self.installed.module)
        name = (context, owner)  # two branches in one batch have the same context
        if name not in self.known:
            for other in self.experts:
                other.known = {}
            turn = self.clock.next_branch() % self.cfg
            self.known[name] = PatchBranch(self.new_evaluation(), turn if owner is None else owner)
        return self.known[name]

    def new_evaluation(self) -> PatchEvaluation:
        """Return an evaluation with empty buffers."""
        return PatchEvaluation.of(self.installed.session, self.patches)

    def _named(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = args[0] if args else kwargs.get("name")
        return self._in_context(call(*args, **kwargs), str(name))

    @contextmanager
    def _in_context(self, context: Any, name: str) -> Iterator[Any]:
        before, self._context = self._context, name
        try:
            with context as entered:
                yield entered
        finally:
            self._context = before
