"""Modules before the blocks that run once for all patches of an evaluation: text refiners, for example."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_cp.engine.installed import Installed
from lightning_cp.engine.rules.paths import expand, submodule
from lightning_cp.engine.session import Session
from lightning_cp.errors import PlanError
from lightning_cp.pipelines.pipefusion.evaluation import current_evaluation
from lightning_cp.undoable import Undo, intercept_calls


def run_once(installed: Installed) -> list[Undo]:
    """Compute the modules in `Patches.once` for the first patch only. Returns: functions to undo it."""
    plan, module = installed.rules.patches, installed.module
    return [
        intercept_calls(submodule(module, path), partial(_once, installed.session, path))
        for pattern in (plan.once if plan is not None else ())
        for path in _paths(installed, pattern)
    ]


def _paths(installed: Installed, pattern: str) -> list[str]:
    try:
        return expand(installed.module, pattern)
    except PlanError:  # a part that this configuration does not have
        return []


def _once(session: Session, path: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    evaluation, compute = current_evaluation(session), partial(call, *args, **kwargs)
    return compute() if evaluation is None else evaluation.once(path, compute)
