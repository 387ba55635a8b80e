"""Refuse attention on shards that is computed by code which the engine did not replace."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_cp.engine.lengths import are_whole
from lightning_cp.engine.paths import submodule
from lightning_cp.engine.peers import without_transforms
from lightning_cp.engine.session import Session
from lightning_cp.errors import InterceptionError

_TOKENS = {F.scaled_dot_product_attention: -2, F.multi_head_attention_forward: 0}  # dim of the tokens in the keys
_OURS = ("lightning_cp.engine.attention_dispatch", "lightning_cp.engine.unplanned")
_FORWARD = "lightning_cp.engine.hooks"


class BypassCheck(TorchFunctionMode):
    """Check all calls of PyTorch's attention functions inside one forward of a parallel model.

    Calls may be hidden in helper objects, partials, tables of functions or imports inside a function, where their
    code is not replaced. Calls by the engine, and by modules that the plan marks LOCAL, pass. For other calls, keys and
    values must be the same on all ranks: they are then not split. The check slows each torch function down by a few
    microseconds, so it runs only in the first forward after an installation (see `Session.unchecked`).

    Ranks: all of the context group. Raises: InterceptionError: keys or values are shards.
    """

    def __init__(self, session: Session, model: nn.Module) -> None:
        super().__init__()
        self._session, self._model = session, model
        self._local = {id(submodule(model, path)) for path in session.rules.local}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in _TOKENS:
            tensors = dict(zip(("query", "key", "value"), args)) | dict(given)
            self._check(tensors["key"], tensors["value"], tensors["key"].shape[_TOKENS[func]])
        return func(*args, **given)

    def _check(self, key: Tensor, value: Tensor, keys: int) -> None:
        call = self._session.call
        if call is None or not call.lengths or call.groups.context is None:
            return
        names: list[str] = []
        if self._is_known(names):
            return
        with without_transforms() as plain:
            whole = are_whole(plain((key, value)), keys, call.groups.context)
        if not whole:
            raise InterceptionError(
                f"{' in '.join(names[:3])} makes an attention call that could not be intercepted: its queries would "
                f"attend to this rank's {keys} tokens only. Call F.scaled_dot_product_attention, or diffusers' "
                "dispatch_attention_fn, in the forward of a module, in its processor, or in functions and methods "
                "that these call by name; or mark the module LOCAL in the plan if this is what it should compute"
            )

    def _is_known(self, names: list[str]) -> bool:
        """Return True if the engine or a LOCAL module makes the call; otherwise collect the names of the callers."""
        paths = {id(inner): path for path, inner in self._model.named_modules()}
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None:
            code, module = frame.f_code, frame.f_globals.get("__name__", "")
            if module in _OURS:
                return True
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if id(first) in self._local:
                return True
            if module == _FORWARD and code.co_name == "run":
                return getattr(first, "session", None) is not self._session  # the call of a model inside this one
            if not module.startswith(("torch.", "lightning_cp.", "diffusers.models.attention_dispatch")):
                names.append(f"{paths[id(first)]} ({code.co_qualname})" if paths.get(id(first)) else code.co_qualname)
            frame = frame.f_back
        return False
