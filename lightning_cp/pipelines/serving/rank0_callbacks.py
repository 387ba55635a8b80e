"""Callbacks of a call that run on rank 0 only, so they must not change the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_cp.engine.peers.checksum import version_of

CALLBACK = "callback_on_step_end"  # the pipelines' name of the argument


def check_callback(callback: object) -> None:
    """Refuse objects of the class PipelineCallback. Raises: TypeError: it is one, or several of them."""
    if hasattr(callback, "tensor_inputs"):
        raise TypeError(
            f"{CALLBACK} is a {type(callback).__name__}, which changes the call but would run on rank 0 only: "
            "call the pipeline on every rank without follow, or give a function that changes nothing"
        )


def unchanging(callback: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Wrap rank 0's callback. Raises: ValueError: it makes changes, which the other ranks would not have."""

    def run(*args: Any) -> dict[str, Any]:
        before = {name: (x, _version(x)) for name, x in args[-1].items()}  # it may write into them
        changes = callback(*args) or {}
        after = {**args[-1], **changes}
        changed = [name for name, x in after.items() if not _is_same(x, before.get(name))]
        if changed:
            raise ValueError(
                f"{CALLBACK} runs on rank 0 only and must not change {', '.join(changed)}: return {{}}, or call the "
                "pipeline on every rank without follow"
            )
        return {}

    return run


def no_change(*_: Any) -> dict[str, Any]:
    """Take the place of rank 0's callback on the other ranks."""
    return {}


def _is_same(x: object, before: tuple[object, int] | None) -> bool:
    return before is not None and x is before[0] and _version(x) == before[1]


def _version(x: object) -> int:
    return version_of(x) if isinstance(x, Tensor) else 0
