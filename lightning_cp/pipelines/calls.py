"""Arguments and progress bar of a pipeline's call."""

from __future__ import annotations

import inspect
from typing import Any

from lightning_cp.patching import Undo


def arguments_by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a method's arguments by name; only `kwargs` if they do not fit its signature (the method then raises)."""
    try:
        given = dict(signature.bind_partial(None, *args, **kwargs).arguments)
    except TypeError:
        return kwargs
    del given[next(iter(signature.parameters))]
    extra = [p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    for name in extra:
        given |= given.pop(name, {})
    return given


def only_one_shows_progress(pipe: Any, *, shows: bool) -> Undo:
    """Disable a pipeline's progress bar unless `shows`. Returns: a function to undo it."""
    before = dict(getattr(pipe, "_progress_bar_config", {}))
    if not shows and hasattr(pipe, "set_progress_bar_config"):
        pipe.set_progress_bar_config(**{**before, "disable": True})

    def undo() -> None:
        if hasattr(pipe, "set_progress_bar_config"):
            pipe.set_progress_bar_config(**before)

    return undo
