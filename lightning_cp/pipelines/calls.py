"""Arguments and progress bar of a pipeline's call."""

from __future__ import annotations

import inspect
from typing import Any

from lightning_cp.undoable import Undo, set_attribute


def arguments_by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a method's arguments by name; only `kwargs` if they do not fit its signature (the method then raises)."""
    try:
        arguments = dict(signature.bind_partial(None, *args, **kwargs).arguments)
    except TypeError:
        return kwargs
    del arguments[next(iter(signature.parameters))]
    extra = [p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    for name in extra:
        arguments |= arguments.pop(name, {})
    return arguments


def hide_progress(pipe: Any) -> Undo:
    """Disable a pipeline's progress bar. Returns: a function to undo it."""
    return set_attribute(pipe, "_progress_bar_config", {**getattr(pipe, "_progress_bar_config", {}), "disable": True})
