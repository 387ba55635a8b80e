"""The scopes of a parallel model: which attention and dropout each of its modules computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from lightning_cp.engine.attend import AttentionDispatcher
from lightning_cp.engine.attention.outside_blocks import UnplannedAttention
from lightning_cp.engine.attention.scope import Scope, ScopedAttention
from lightning_cp.engine.attention.scope_hooks import BypassHook, ScopeHook
from lightning_cp.engine.rules.paths import submodule
from lightning_cp.engine.rules.rules import AttentionSpecs, Rules
from lightning_cp.engine.session import Session

_UNPLANNED = "unplanned"
_Kinds = AttentionSpecs | str | None  # kinds of attention, or _UNPLANNED; (): LOCAL; None: derived from token counts


class Scopes:
    """The scopes of one model. Modules of a kind share one scope, so that compiled blocks share their graphs.

    Reused when the plan is installed again, so that compiled blocks stay valid.
    """

    def __init__(self, session: Session, model: nn.Module) -> None:
        self._session, self._model = session, model
        self._scopes: dict[tuple[_Kinds, bool], Scope] = {}
        self._hooks: dict[tuple[Scope, Scope, bool], ScopeHook] = {}

    def of_model(self, rules: Rules) -> Scope:
        """Return the scope outside of blocks."""
        return self._scope(_UNPLANNED if rules.main else None, drops=False)

    def hooks(self, rules: Rules) -> Iterator[tuple[nn.Module, ScopeHook | BypassHook]]:
        """Yield each module with another scope than the module around it, and those around attention, with a hook.

        In blocks with attention across ranks and in modules of `rules.not_followed`, the hook checks the interception.
        """
        model, planned = self._model, self._own(rules)
        across = {path for path in rules.blocks if any(f"{at}.".startswith(f"{path}.") for at in rules.attention)}
        hooked = {*rules.blocks, *(x for path in rules.attention for x in (*_parents(path), path))}
        scopes: dict[str, Scope] = {"": self.of_model(rules)}
        seen: set[nn.Module] = set()  # one module may have several paths, through wrappers for example
        for path in sorted({*planned, *hooked} - {""}, key=lambda path: path.count(".")):
            around = _around(path, scopes)
            scopes[path] = planned.get(path, around)
            module = submodule(model, path)
            if module in seen or isinstance(module, nn.ModuleList):
                continue
            if path in hooked or scopes[path] is not around:
                seen.add(module)
                yield module, self._hook(scopes[path], around, path in across or path in rules.not_followed)
        for path, module in model.named_modules():
            if isinstance(module, nn.MultiheadAttention):
                yield module, BypassHook(self._session, model, self._scope((), drops=False), _around(path, scopes))

    def _own(self, rules: Rules) -> dict[str, Scope]:
        model = self._model
        whole = {_canonical(model, path) for rule in rules.arguments if rule.gathers for path in rule.paths if path}
        planned = {
            path: self._scope(kinds, drops=True) for path, kinds in (*rules.scopes.items(), *rules.attention.items())
        }
        if not rules.blocks:  # without blocks, the outermost modules with attention get shards
            outermost = {_outermost(model, path) for path in rules.attention if path}
            planned |= {path: self._scope(None, drops=True) for path in outermost}
        inside = tuple(f"{path}." for path in whole)
        planned = {path: scope for path, scope in planned.items() if not path.startswith(inside)}
        return planned | dict.fromkeys(whole, self._scope((), drops=False))

    def _scope(self, kinds: _Kinds, *, drops: bool) -> Scope:
        key = kinds, drops
        if key not in self._scopes:
            attention: ScopedAttention | None = None
            if kinds == _UNPLANNED:
                attention = UnplannedAttention(self._session, self._model)
            elif kinds is None or (isinstance(kinds, tuple) and kinds):
                attention = AttentionDispatcher(self._session, kinds)
            self._scopes[key] = Scope(self._session, attention, drops)
        return self._scopes[key]

    def _hook(self, scope: Scope, around: Scope, checked: bool) -> ScopeHook:
        """Return one hook for all modules that need equal ones, so that compiled blocks can share their code."""
        key = scope, around, checked
        if key not in self._hooks:
            self._hooks[key] = ScopeHook(self._session, self._model, *key)
        return self._hooks[key]


def _parents(path: str) -> list[str]:
    """List the paths of the modules around a module, outer ones first, from the model itself on."""
    atoms = path.split(".")
    return [".".join(atoms[:i]) for i in range(len(atoms))]


def _canonical(module: nn.Module, path: str) -> str:
    """Return a path with the index of a module in place of "-1", the last module of a list."""
    atoms: list[str] = []
    for atom in path.split("."):
        children = submodule(module, ".".join(atoms))._modules
        atoms.append(str(len(children) + int(atom)) if atom.startswith("-") else atom)
    return ".".join(atoms)


def _around(path: str, scopes: Mapping[str, Scope]) -> Scope:
    return next(scopes[parent] for parent in reversed(_parents(path)) if parent in scopes)


def _outermost(module: nn.Module, path: str) -> str:
    """Return the shortest prefix of a path that is a module other than a list or dict of modules."""
    containers = (nn.ModuleList, nn.ModuleDict)
    return next((x for x in _parents(path)[1:] if not isinstance(submodule(module, x), containers)), path)
