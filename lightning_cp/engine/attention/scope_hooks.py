"""Hooks that set the attention scope, check that attention is intercepted, and find the forward of a replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.comm.stats import STATS
from lightning_cp.compat.diffusers_hooks import hooks_of
from lightning_cp.engine.attention.scope import SCOPE, Scope
from lightning_cp.engine.hook_base import EngineHook
from lightning_cp.engine.session import Session
from lightning_cp.engine.sharding.lengths import possible_sizes
from lightning_cp.errors import InterceptionError

_MARK = "_lightning_cp_call"  # on a block's first tensor argument: its forward (`Call`), for recomputation
_SKIPS = ("TransformerBlockSkipHook", "AttentionProcessorSkipHook")  # hooks of diffusers' apply_layer_skip


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
