"""Refuse attention on shards by original functions, which code may hold from before the plan was applied."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_cp.engine.attention.scope import SCOPE
from lightning_cp.engine.attention.stand_ins import ORIGINALS, SDPA
from lightning_cp.engine.peers.comparison import without_transforms
from lightning_cp.engine.session import Session
from lightning_cp.engine.sharding.lengths import are_whole
from lightning_cp.errors import InterceptionError

_OTHERS = ("torch.", "lightning_cp.", "diffusers.models.attention_dispatch")


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
