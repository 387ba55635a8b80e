"""Attention outside of the planned blocks: runs as it is on whole keys, and is refused on shards."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cp.engine.attention.scope import without_scope
from lightning_cp.engine.attention.stand_ins import DISPATCH, ORIGINALS, SDPA
from lightning_cp.engine.peers.comparison import without_transforms
from lightning_cp.engine.session import Session
from lightning_cp.engine.sharding.lengths import are_whole, possible_sizes
from lightning_cp.errors import InterceptionError


@dataclass(eq=False)
class UnplannedAttention:
    """Attention calls of modules that the plan does not describe (a text refiner, or a module in place of a norm).

    Before anything is split, they run as they are. After that, keys and values must be the same on all ranks, which
    costs an all-gather of a few numbers and a host synchronisation for each call. Compiled code compares token counts
    instead.

    Attributes: model: the parallel model; `session.rules.unplanned` has the paths of modules that are known to attend.
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
        paths = self.session.rules.unplanned or ("the model",)
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
