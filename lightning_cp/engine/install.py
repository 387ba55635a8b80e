"""Carrying out a plan's rules on one model, and undoing it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from lightning_cp.engine.entry import Entry
from lightning_cp.engine.halo import HaloHook
from lightning_cp.engine.hooks import ArgumentHook, ModelHook, OutputHook, Shared
from lightning_cp.engine.linear import LinearAttention
from lightning_cp.engine.padding import PadHook
from lightning_cp.engine.paths import submodule, unwrapped
from lightning_cp.engine.rules import Kinds, Rules
from lightning_cp.engine.scopes import BypassHook, ScopeHook
from lightning_cp.engine.seam import Seam, exchange_processor
from lightning_cp.engine.session import Session

Undo = Callable[[], None]


def install(module: nn.Module, rules: Rules, session: Session, *, signature: Any, dispatcher: Any) -> Undo:
    """Carry out `rules` on `module`; return what undoes it all. Should a step fail, those before it are undone."""
    undo: list[Undo] = []

    def undo_all() -> None:
        while undo:
            undo.pop()()

    try:
        moving = _Moving(module)
        undo.append(moving.remove)
        _install_attention(module, rules, session, dispatcher, undo)
        checkpointing = [inner for inner in module.modules() if hasattr(inner, "gradient_checkpointing")]
        around = ModelHook(session, signature, rules, checkpointing, moving.follow)
        _add(undo, module.register_forward_pre_hook(around.before, with_kwargs=True))
        if rules.pads:
            padding = PadHook(session, signature, rules.pads)
            _add(undo, module.register_forward_pre_hook(padding.before, with_kwargs=True))
        for scope, hook in _scopes(module, rules, session):
            _add(undo, scope.register_forward_pre_hook(hook.before, with_kwargs=True))
            _add(undo, scope.register_forward_hook(hook.after, always_call=True))
        for inner in module.modules():
            if isinstance(inner, nn.MultiheadAttention):
                bypass = BypassHook(session, module)
                _add(undo, inner.register_forward_pre_hook(bypass.before, with_kwargs=True))
        for rule in rules.arguments:
            refused = rules.refused if rule.is_block else {}
            order = list(inspect.signature(type(submodule(module, rule.paths[0])).forward).parameters)[1:]
            cutter = ArgumentHook(session, rule, refused, rule.paths[0] or "forward", order if refused else ())
            for path in rule.paths:
                moving.add(path, partial(_register_before, cutter))
        for output in rules.outputs:
            joiner = OutputHook(session, output)
            moving.add(output.path, partial(_register_after, joiner))
        for halo in rules.halos:
            moving.add(halo.path, partial(_register_around, HaloHook(session, halo)))
        _add(undo, module.register_forward_hook(around.after, always_call=True))
    except BaseException:
        undo_all()
        raise
    return undo_all


class _Moving(Shared):
    """Hooks that belong to a place in the model, not to the module that happened to be there."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._placed: list[tuple[str, nn.Module, Callable[[nn.Module], Any], Any]] = []

    def add(self, path: str, register: Callable[[nn.Module], Any]) -> None:
        at = submodule(self._module, path)
        self._placed.append((path, at, register, register(at)))

    def follow(self) -> None:
        for i, (path, before, register, handle) in enumerate(self._placed):
            now = submodule(self._module, path)
            if now is not before:
                handle.remove()
                self._placed[i] = (path, now, register, register(now))

    def remove(self) -> None:
        for _, _, _, handle in self._placed:
            handle.remove()
        self._placed.clear()


def _install_attention(module: nn.Module, rules: Rules, session: Session, dispatcher: Any, undo: list[Undo]) -> None:
    seams: dict[Kinds | None, Seam] = {}
    for path, kinds in rules.attention.items():
        if kinds and kinds[0].form == "linear":
            undo.append(exchange_processor(submodule(module, path), LinearAttention(session)))
            continue
        if kinds not in seams:
            entry = Entry(session, kinds, dispatcher)
            seams[kinds] = Seam(entry.dispatch, entry.sdpa)
        undo.append(seams[kinds].intercept(submodule(module, path), mark=session.config if kinds is None else None))


def _scopes(module: nn.Module, rules: Rules, session: Session) -> list[tuple[nn.Module, ScopeHook]]:
    """Every module between the model and its attention; blocks with any across ranks are checked for interception."""
    blocks = {path for rule in rules.arguments if rule.is_block for path in rule.paths}
    across = {path for path in blocks if any(f"{at}.".startswith(f"{path}.") for at in rules.attention)}
    paths = set(blocks)
    for path in rules.attention:
        atoms = path.split(".")
        paths |= {".".join(atoms[: i + 1]) for i in range(len(atoms))}
    # Few hooks for many blocks, so that compiled blocks can share their code.
    hooks = {(a, b): ScopeHook(session, module, a, b) for a in (True, False) for b in (True, False)}
    scopes = []
    for path in sorted(paths - {""}):
        scope = unwrapped(submodule(module, path))
        if isinstance(scope, nn.ModuleList):
            continue
        parents = {".".join(path.split(".")[:i]) for i in range(1, path.count(".") + 1)}
        has_scope_above = any(not isinstance(submodule(module, p), nn.ModuleList) for p in parents)
        scopes.append((scope, hooks[not has_scope_above, path in across]))
    return scopes


def _register_before(hook: ArgumentHook, module: nn.Module) -> Any:
    return module.register_forward_pre_hook(hook.before, with_kwargs=True)


def _register_after(hook: OutputHook, module: nn.Module) -> Any:
    return module.register_forward_hook(hook.after)


class _Handles:
    """Several, removed as one."""

    def __init__(self, *handles: Any) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _register_around(hook: HaloHook, module: nn.Module) -> Any:
    return _Handles(module.register_forward_pre_hook(hook.before), module.register_forward_hook(hook.after))


def _add(undo: list[Undo], handle: Any) -> None:
    undo.append(handle.remove)
