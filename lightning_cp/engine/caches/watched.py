"""Watch one hook of a step cache: whether it runs the module's own forward, and whether its state fits this forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_cp.engine.caches.table import Cache
from lightning_cp.engine.hook_base import EngineHook
from lightning_cp.engine.session import Session
from lightning_cp.errors import ShapeError
from lightning_cp.undoable import Undo, undo_all

_Lengths = tuple[tuple[str, int], ...]  # global number of tokens of each modality


class WatchedHook(EngineHook):
    """A hook of diffusers' caches, with this object in the place of its `fn_ref`.

    The hook then runs the module's own forward through `original_forward`, so this object knows whether it did. A
    module that a cache skips makes no attention call, which the engine would otherwise report as an error.

    Attributes:
        hook: the hook of diffusers.
        cache: the cache that it belongs to.
        undo: functions that restore the hook's own decisions, to be called last to first.
        before_compute: called with the arguments before the module's own forward; None for most hooks.
        forget_more: called when the state is reset; None for most hooks.
        computed, skipped: number of calls in which the module's own forward ran, and did not.
    """

    def __init__(self, hook: Any, module: Any, cache: Cache, session: Session) -> None:
        self.hook, self.module, self.cache, self.session = hook, module, cache, session
        self.undo: list[Undo] = []
        self.before_compute: Callable[[dict[str, Any]], None] | None = None
        self.forget_more: Undo | None = None
        self._reference: Any = hook.fn_ref  # diffusers' object with the functions that the hooked forward calls
        self._run: Any = self._reference.forward
        self.computed = self.skipped = 0
        self._computed = False
        self._lengths: dict[str | None, _Lengths] = {}

    def install(self) -> None:
        """Take the place of the hook's `fn_ref`. Hooks that only change arguments or results are left alone."""
        if hasattr(self.hook, "new_forward"):
            self.hook.fn_ref, self._reference.forward = self, self.run

    def uninstall(self) -> None:
        """Undo `install`, and restore the hook's own decisions."""
        undo_all(self.undo)
        if self.hook.fn_ref is self:
            self.hook.fn_ref, self._reference.forward = self._reference, self._run

    @property
    def states(self) -> Any:
        """Return diffusers' `StateManager` of the hook; None if the hook keeps one state."""
        return getattr(self.hook, "state_manager", None)

    @property
    def context(self) -> str | None:
        """Return the name of the current `cache_context`; None if there is none, or if the state is not kept by it."""
        context = getattr(self.states, "_context", None)
        return None if context is None else context.name

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the hook. Raises: ShapeError: it skipped the module, but its state has other numbers of tokens."""
        call = self.session.call
        if call is None:  # a hook around the whole model, outside of the engine's forward
            return self._run(*args, **kwargs)
        self._computed, name = False, self.context
        lengths = self.lengths
        try:
            output = self._run(*args, **kwargs)
        except (RuntimeError, ValueError):
            if not self._computed:
                self.check_lengths()  # the cause of an error about shapes; shards may fit on some ranks only
            raise
        if self._computed:
            self.computed += 1
            self._lengths[name] = lengths
        else:
            self.check_lengths()
            self.skipped += 1
            call.intercepted = True  # there was no attention that could have been intercepted
        return output

    def original_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward: the hook calls this."""
        self._computed = True
        if self.before_compute is not None:
            self.before_compute(kwargs)
        return self._reference.original_forward(*args, **kwargs)

    @property
    def lengths(self) -> _Lengths:
        """Return the global numbers of tokens in this forward."""
        return () if self.session.call is None else tuple(self.session.call.lengths.items())

    @property
    def fits(self) -> bool:
        """Return True if the state has the numbers of tokens of this forward; equal on all ranks."""
        return self._lengths.get(self.context, self.lengths) == self.lengths

    def check_lengths(self) -> None:
        """Check the token counts of the state. Raises: ShapeError, on every rank: they are those of another forward."""
        if not self.fits:
            before, now = dict(self._lengths[self.context]), dict(self.lengths)
            raise ShapeError(
                f"{self.cache.name} keeps results for {before} tokens, but this step has {now}: before a sample of "
                "another size, empty the cache on every rank (transformer._reset_stateful_cache())"
            )

    def reset(self) -> None:
        """Forget all steps. (diffusers' own reset also ends the `cache_context` under way.)"""
        self._lengths.clear()
        for states in self._managers():
            states._state_cache.clear()
        if hasattr(self.hook, "state"):
            self.hook.state.reset()
        if self.forget_more is not None:
            self.forget_more()

    def forget(self, name: str) -> None:
        """Forget the steps of one `cache_context`."""
        self._lengths.pop(name, None)
        for states in self._managers():
            states._state_cache.pop(name, None)

    def _managers(self) -> list[Any]:
        return [x for x in vars(self.hook).values() if hasattr(x, "_state_cache")]
