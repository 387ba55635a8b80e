"""Track which step caches of diffusers are enabled on one parallel model, also after later changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.comm.transfer import all_gather_ints
from lightning_cp.compat.compiler import uncompiled
from lightning_cp.compat.diffusers_names import hooks_of
from lightning_cp.engine.caches.table import Cache, cache_of
from lightning_cp.engine.caches.watched import DECISIONS, WatchedHook
from lightning_cp.engine.peers.checksum import digest_ints
from lightning_cp.engine.session import Session
from lightning_cp.errors import PeerMismatchError, PlanError

_CACHE_DIT = "_is_cached"  # set by the package cache-dit on a transformer
_SETTINGS = (bool, int, float, str, tuple, list, torch.dtype, Tensor)
_UNNAMED = "inference"  # the context that some caches of diffusers set if the pipeline names none


class StepCaches:
    """The step caches on one model.

    A cache is found by its hooks, so `enable_cache` and functions such as `apply_first_block_cache` may be called
    before or after the model becomes parallel. A cache keeps this rank's shards (of residuals or attention
    outputs). Before each forward, ranks compare the progress of their caches: an interrupted forward may have ended at
    different steps.

    Attributes:
        hooks: the watched hooks.
    """

    def __init__(self, module: nn.Module, session: Session) -> None:
        self.hooks: list[WatchedHook] = []
        self._module, self._session = module, session
        self._on_model: list[Any] = []
        self._settings: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self.hooks)

    @property
    def kinds(self) -> list[Cache]:
        """Return the caches that are on."""
        return list(dict.fromkeys(watched.cache for watched in self.hooks))

    def settings(self) -> dict[str, str]:
        """Return the settings of each kind of hook, and the modules it is on, as texts that ranks can compare."""
        names = {module: name for name, module in self._module.named_modules()}
        paths: dict[str, list[str]] = {}
        for watched in self.hooks:
            paths.setdefault(_settings(watched.hook), []).append(names.get(watched.module, ""))
        return {text: f"{len(on)} modules ({digest_ints(list(on), 1)[0]:x})" for text, on in paths.items()}

    @property
    def context(self) -> str | None:
        """Return the name of the current `cache_context`, None if the pipeline gives none."""
        names = {watched.context for watched in self.hooks} - {None, _UNNAMED}
        return next(iter(sorted(names)), None)  # type: ignore[type-var]

    def have_changed(self) -> bool:
        """Return True if hooks were put on or taken off the model itself. Those inside it change its structure."""
        return _hooks_on(self._module) != self._on_model or getattr(self._module, _CACHE_DIT, False)

    def follow(self) -> None:
        """Watch new hooks, and forget removed ones. Raises: PlanError: a cache that is not one of diffusers."""
        if getattr(self._module, _CACHE_DIT, False):
            raise PlanError(
                f"cache-dit is enabled on {type(self._module).__name__}: it replaces the blocks in each forward, and "
                "decides by the tokens of one rank. Load the model again, and use a step cache of diffusers "
                "(transformer.enable_cache)"
            )
        known = {id(watched.hook): watched for watched in self.hooks}
        on_modules = [(module, hook) for module in self._module.modules() for hook in _hooks_on(module)]
        for _, hook in on_modules:
            self._check(hook)
        self.hooks = [
            known.pop(id(hook)) if id(hook) in known else self._watch(module, hook) for module, hook in on_modules
        ]
        for gone in known.values():
            gone.uninstall()
        self._on_model, self._settings = _hooks_on(self._module), self.settings()

    def release(self) -> None:
        """Stop watching the hooks, and drop the shards that the caches keep."""
        for watched in self.hooks:
            watched.reset()
            watched.uninstall()
        self.hooks, self._on_model = [], []

    def reset(self) -> None:
        """Forget all steps of all contexts."""
        for watched in self.hooks:
            watched.reset()

    def forget(self, name: str) -> None:
        """Forget all steps of one `cache_context`."""
        for watched in self.hooks:
            watched.forget(name)

    def before_forward(self, kwargs: dict[str, Any]) -> None:
        """Compare the progress of the caches between ranks.

        If a hook was put on the model itself after the last forward, it is already running, and was not watched when it
        started. So `before_compute` is called here, for all hooks.

        Ranks: all of `session.batch_group`. Raises: PeerMismatchError, on all of these ranks.
        """
        for watched in self.hooks:
            if watched.before_compute is not None and watched.context is not None:
                watched.before_compute(kwargs)
        if self.hooks and self._session.batch_group is not None:
            uncompiled(self._compare)()

    def _compare(self) -> None:
        group = self._session.batch_group
        assert group is not None, "the caller has checked it"
        digests = [*digest_ints(list(self._settings.items()), 1), *digest_ints(list(_progress(self.hooks)), 1)]
        by_rank = all_gather_ints(digests, group=group)
        names = ", ".join(kind.name for kind in self.kinds)
        if any(settings != by_rank[0][0] for settings, _ in by_rank):
            raise PeerMismatchError(
                f"the {names} of the ranks that share a sample have different settings, here "
                f"{', '.join(self._settings)}: enable the same step caches on every rank"
            )
        if any(other != by_rank[0] for other in by_rank):
            raise PeerMismatchError(
                f"the {names} of the ranks that share a sample are at different steps, for example "
                "because a call was interrupted on some of them: empty the cache on every rank "
                "(transformer._reset_stateful_cache())"
            )

    def _watch(self, module: nn.Module, hook: Any) -> WatchedHook:
        cache = cache_of(hook)
        assert cache is not None, "the caller has checked the hook"
        watched = WatchedHook(hook, module, cache, self._session)
        decide = DECISIONS.get(type(hook).__name__)
        if decide is not None:
            watched.undo.append(decide(watched))
        watched.install()
        return watched

    def _check(self, hook: Any) -> None:
        name = type(hook).__name__
        if cache_of(hook) is None:
            raise PlanError(
                f"{name} is derived from a step cache of diffusers, and lightning_cp does not know how it decides: use "
                "diffusers' cache itself, or call remove_context_parallel"
            )
        if isinstance(hook.fn_ref, WatchedHook) and hook.fn_ref.hook is not hook:
            raise PlanError(
                f"{type(self._module).__name__} is a deep copy of a model with a step cache ({name}), and diffusers' "
                "hooks on a copy run the blocks of the original: copy the model before you enable the cache"
            )


def _hooks_on(module: nn.Module) -> list[Any]:
    return [hook for kind, hook in hooks_of(module) if kind == "cache"]


def _settings(hook: Any) -> str:
    """Describe a hook's settings. Functions, such as the one that returns the timestep, are left out."""
    states = getattr(hook, "state_manager", None)
    settings = {**vars(hook), **getattr(states, "_init_kwargs", {})}
    if hasattr(hook, "config"):
        settings |= vars(hook.config)
    shown = (f"{name}={x!r}" for name, x in sorted(settings.items()) if isinstance(x, _SETTINGS) and name[0] != "_")
    return f"{type(hook).__name__}({', '.join(shown)})"


def _progress(hooks: Iterable[WatchedHook]) -> Iterator[object]:
    """Yield the state that the caches decide by: step counters, and which steps have stored results."""
    seen: set[int] = set()
    for watched in hooks:
        states = watched.states
        if states is None:
            yield _scalars(getattr(watched.hook, "state", None))
        elif id(states) not in seen:
            seen.add(id(states))
            yield watched.context
            yield [(name, _scalars(state)) for name, state in sorted(states._state_cache.items())]


def _scalars(state: Any) -> list[tuple[str, object]]:
    """List the attributes of a state: numbers and texts by value, others by type, because tensors are shards."""
    return [
        (name, x if isinstance(x, (int, float, str, type(None))) else _shown(x))
        for name, x in (() if state is None else sorted(vars(state).items()))
    ]


def _shown(x: object) -> tuple[str, int]:
    return type(x).__name__, 0 if isinstance(x, Tensor) or not hasattr(x, "__len__") else len(x)
