"""Attention that the engine does not compute: it runs as it is on whole keys, and is refused on shards.

It is outside of the planned blocks, or uses original functions, which code may hold from before the plan was applied.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_cp.engine.attention.scope import SCOPE, without_scope
from lightning_cp.engine.attention.stand_ins import DISPATCH, ORIGINALS, SDPA
from lightning_cp.engine.peers.comparison import without_transforms
from lightning_cp.engine.session import Session
from lightning_cp.engine.sharding.lengths import are_whole, possible_sizes
from lightning_cp.errors import InterceptionError

_OTHERS = ("torch.", "lightning_cp.", "diffusers.models.attention_dispatch")


@dataclass(eq=False)
class UnplannedAttention:
    """Attention calls of modules that the plan does not describe (a text refiner, or a module in place of a norm).

    Before anything is split, they run as they are. After that, keys and values must be the same on all ranks, which
    costs an all-gather of a few numbers and a host synchronisation for each call. Compiled code compares token counts
    instead.

    Attributes: model: the parallel model; `session.model_plan.unplanned` has the paths of modules known to attend.
    Ranks: all of the context group.
    Raises: InterceptionError: keys or values are shards, so queries would attend to this rank's tokens only.
    """

    session: Session
    model: nn.Module

    def __deepcopy__(self, memo: object) -> UnplannedAttention:
        return self

    def dispatch(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Check the keys, then call `diffusers...dispatch_attention_fn`; tensors are [b, s, h, d]."""
        self._check(key, value, key.shape[1])
        out: Tensor = without_scope(ORIGINALS[DISPATCH], query, key, value, *args, **kwargs)
        return out

    def sdpa(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Check the keys, then call `F.scaled_dot_product_attention`; tensors are [b, h, s, d]."""
        self._check(key, value, key.shape[-2])
        out: Tensor = without_scope(ORIGINALS[SDPA], query, key, value, *args, **kwargs)
        return out

    def flex(
        self, original: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Check the keys, then call `flex_attention`; tensors are [b, h, s, d]."""
        self._check(key, value, key.shape[-2])
        return without_scope(original, query, key, value, *args, **kwargs)

    def _check(self, key: Tensor, value: Tensor, keys: int) -> None:
        call = self.session.call
        if call is None or not call.lengths or not call.is_split:
            return
        if torch.compiler.is_compiling() or call.groups.context is None:
            # Compared with the counts of all ranks, so that all ranks take the same decision: whole keys that are as
            # many as the shard of some rank are refused too, because that rank cannot distinguish them.
            split = any(keys in sizes for sizes in possible_sizes(call))
        else:
            with without_transforms() as plain:
                split = not are_whole(plain((key, value)), keys, call.groups.context)
        if split:
            raise InterceptionError(
                f"{self._caller()} makes an attention call outside of the plan's blocks on keys that "
                f"are split: its queries would attend to this rank's {keys} tokens only. Make the call in a block, or "
                "gather its tokens before it: list the module in `whole` of the plan, or gather at an earlier module"
            )

    def _caller(self) -> str:
        """Return the path of the module that is attending: the innermost one on the stack."""
        paths = self.session.model_plan.unplanned or ("the model",)
        if not torch.compiler.is_compiling():
            modules = {id(inner): path or "the model itself" for path, inner in self.model.named_modules()}
            frame: types.FrameType | None = sys._getframe()
            while frame is not None:
                code = frame.f_code
                first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
                if id(first) in modules:
                    return modules[id(first)]
                frame = frame.f_back
        return " or ".join(path or "the model itself" for path in paths)


class MissedCalls(TorchFunctionMode):
    """Check all calls of PyTorch's original attention functions inside one forward of a parallel model.

    A table, a partial or a default argument may hold the original function from before. In modules that the plan marks
    LOCAL, such calls pass. For others, keys and values must be the same on all ranks: they are then not split. The
    check slows each torch function down by a few microseconds, so it runs only in the first forward after an
    installation (see `Session.unchecked`).

    Ranks: all of the context group. Raises: InterceptionError: keys or values are shards.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        tokens = -2 if func is ORIGINALS.get(SDPA) else 0 if func is F.multi_head_attention_forward else None
        scope = SCOPE.current
        if tokens is not None and scope is not None and scope.attention is not None and scope.session is self._session:
            tensors = dict(zip(("query", "key", "value"), args)) | dict(keywords)
            self._check(tensors["key"], tensors["value"], tensors["key"].shape[tokens])
        return func(*args, **keywords)

    def _check(self, key: Tensor, value: Tensor, keys: int) -> None:
        call = self._session.call
        if call is None or not call.lengths or call.groups.context is None:
            return
        with without_transforms() as plain:
            whole = are_whole(plain((key, value)), keys, call.groups.context)
        if not whole:
            raise InterceptionError(
                f"{' in '.join(_callers()[:3])} makes an attention call that could not be intercepted: its queries "
                f"would attend to this rank's {keys} tokens only. Call F.scaled_dot_product_attention, or diffusers' "
                "dispatch_attention_fn, by these names, instead of a reference from before apply_context_parallel; or "
                "mark the module LOCAL in the plan if this is what it should compute"
            )


def _callers() -> list[str]:
    """List the names of the functions that make the current call, innermost first."""
    names = []
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_OTHERS):
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return names
