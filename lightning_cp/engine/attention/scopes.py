"""The scopes of a parallel model: which attention and dropout each module computes, and the hooks that set them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.comm.stats import STATS
from lightning_cp.compat.diffusers_names import hooks_of
from lightning_cp.engine.attend import AttentionDispatcher
from lightning_cp.engine.attention.outside_blocks import UnplannedAttention
from lightning_cp.engine.attention.scope import SCOPE, Scope, ScopedAttention
from lightning_cp.engine.hook_base import EngineHook
from lightning_cp.engine.model_plan import AttentionSpecs, ModelPlan
from lightning_cp.engine.paths import submodule
from lightning_cp.engine.session import Session
from lightning_cp.engine.sharding.lengths import possible_sizes
from lightning_cp.errors import InterceptionError

_UNPLANNED = "unplanned"
_Kinds = AttentionSpecs | str | None  # kinds of attention, or _UNPLANNED; (): LOCAL; None: derived from token counts
_MARK = "_lightning_cp_call"  # on a block's first tensor argument: its forward (`Call`), for recomputation
_SKIPS = ("TransformerBlockSkipHook", "AttentionProcessorSkipHook")  # hooks of diffusers' apply_layer_skip


class Scopes:
    """The scopes of one model. Modules of a kind share one scope, so that compiled blocks share their graphs.

    Reused when the plan is installed again, so that compiled blocks stay valid.
    """

    def __init__(self, session: Session, model: nn.Module) -> None:
        self._session, self._model = session, model
        self._scopes: dict[tuple[_Kinds, bool], Scope] = {}
        self._hooks: dict[tuple[Scope, Scope, bool], ScopeHook] = {}

    def of_model(self, fitted: ModelPlan) -> Scope:
        """Return the scope outside of blocks."""
        return self._scope(_UNPLANNED if fitted.main else None, drops=False)

    def hooks(self, fitted: ModelPlan) -> Iterator[tuple[nn.Module, ScopeHook | BypassHook]]:
        """Yield each module with another scope than the module around it, and those around attention, with a hook.

        In blocks with attention across ranks and in modules of `not_followed`, the hook checks the interception.
        """
        model, planned = self._model, self._own(fitted)
        across = {path for path in fitted.blocks if any(f"{at}.".startswith(f"{path}.") for at in fitted.attention)}
        hooked = {*fitted.blocks, *(x for path in fitted.attention for x in (*_parents(path), path))}
        scopes: dict[str, Scope] = {"": self.of_model(fitted)}
        seen: set[nn.Module] = set()  # one module may have several paths, through wrappers for example
        for path in sorted({*planned, *hooked} - {""}, key=lambda path: path.count(".")):
            around = _around(path, scopes)
            scopes[path] = planned.get(path, around)
            module = submodule(model, path)
            if module in seen or isinstance(module, nn.ModuleList):
                continue
            if path in hooked or scopes[path] is not around:
                seen.add(module)
                yield module, self._hook(scopes[path], around, path in across or path in fitted.not_followed)
        for path, module in model.named_modules():
            if isinstance(module, nn.MultiheadAttention):
                yield module, BypassHook(self._session, model, self._scope((), drops=False), _around(path, scopes))

    def _own(self, fitted: ModelPlan) -> dict[str, Scope]:
        model = self._model
        whole = {_canonical(model, path) for rule in fitted.arguments if rule.gathers for path in rule.paths if path}
        planned = {
            path: self._scope(kinds, drops=True) for path, kinds in (*fitted.scopes.items(), *fitted.attention.items())
        }
        if not fitted.blocks:  # without blocks, the outermost modules with attention get shards
            outermost = {_outermost(model, path) for path in fitted.attention if path}
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


@dataclass(eq=False)
class ScopeHook(EngineHook):
    """Hook around a block, and around modules in it: sets the scope of the module, and then that around it.

    The scope around a module is known from the plan. So no state is kept, and activation recomputation, which may run
    any of these modules alone, also after an exception, has the scopes of the forward. In recomputation the hook also
    finds the `Call` of the forward.

    Attributes:
        scope: inside the module.
        around: around the module, in the model's forward.
        checked: check after the module that attention was intercepted.
    """

    session: Session
    model: nn.Module
    scope: Scope
    around: Scope
    checked: bool

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session = self.session
        if not torch.compiler.is_compiling():  # in compiled blocks, recomputation does not run the hooks
            STATS.enter(module, self.model)
            self._find_call(args, kwargs)
            if not session.forwards and (SCOPE.current is None or SCOPE.current.session is not session):
                SCOPE.entry = module, SCOPE.current, SCOPE.entry
        if self.checked and session.call is not None:
            session.call.intercepted = False
        SCOPE.current = self.scope

    def _find_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Mark the block's first tensor with the current forward; in recomputation, find that forward by the mark."""
        session = self.session
        first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if session.forwards:
            if first is not None:
                setattr(first, _MARK, session.call)
        elif first is not None and hasattr(first, _MARK):
            session.call = getattr(first, _MARK)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        session = self.session
        SCOPE.current = self.around
        call = session.call
        if not torch.compiler.is_compiling() and SCOPE.entry is not None and SCOPE.entry[0] is module:
            _, SCOPE.current, SCOPE.entry = SCOPE.entry  # end of a recomputation
            session.call = None
        escaped = self.checked and output is not None and call is not None and not call.intercepted
        if escaped and not _skips_attention(module):
            raise InterceptionError(
                f"{path_of(module, self.model)} ran on a shard, but none of its attention calls was intercepted, so "
                "its result would be wrong. If the forward of this module or of a submodule was replaced, it must call "
                "the original forward, F.scaled_dot_product_attention or diffusers' dispatch_attention_fn"
            )


@dataclass(eq=False)
class BypassHook(EngineHook):
    """Hook around `nn.MultiheadAttention`, which cannot be intercepted: allows whole tokens, and refuses a shard.

    Attributes: scope: scope of the original functions. around: scope around the module.
    """

    session: Session
    model: nn.Module
    scope: Scope
    around: Scope

    def before(self, module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        SCOPE.current = self.scope
        call, query = self.session.call, args[0] if args else kwargs.get("query")
        if call is None or not call.is_split or not isinstance(query, Tensor) or query.ndim != 3:
            return
        tokens, rank = query.shape[1 if module.batch_first else 0], call.groups.context_rank
        if any(sizes[rank] == tokens for sizes in possible_sizes(call)) and tokens not in call.unsplit_lengths:
            raise InterceptionError(
                f"{path_of(module, self.model)} is an nn.MultiheadAttention, which would attend to this rank's "
                f"{tokens} tokens only: use F.scaled_dot_product_attention, or gather the tokens before it"
            )

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        SCOPE.current = self.around


def _skips_attention(block: nn.Module) -> bool:
    """Return True if a diffusers guider skips the block or attention in it, so that tokens do not interact."""
    hooks = [hook for inner in block.modules() for kind, hook in hooks_of(inner) if kind == "guider"]
    return any(type(hook).__name__ in _SKIPS and hook.dropout == 1 for hook in hooks)


def path_of(module: nn.Module, model: nn.Module) -> str:
    """Return the path of a module in a model, or its class name if it is not part of the model."""
    return next((path for path, inner in model.named_modules() if inner is module), type(module).__name__)
