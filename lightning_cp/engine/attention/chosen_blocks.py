"""NABLA: attention to blocks of keys that a model chooses from means of queries and keys (Kandinsky 5 and 6).

Functions of diffusers compute the means over blocks of 64 tokens, a softmax over their products, and a `BlockMask` of
the blocks with the largest weights. Here, each rank computes the means of its own blocks, and all means are gathered:
the rest of the function then computes the table of the whole sequence, the same on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_cp.comm.shards import gather_shards
from lightning_cp.compat.compiler import uncompiled
from lightning_cp.engine.attention.scope import SCOPE, without_scope
from lightning_cp.engine.session import Session
from lightning_cp.errors import InterceptionError, ShapeError

# by module: (query, key, sliding-tile mask, …) -> BlockMask
CHOOSERS = {
    "diffusers.models.transformers.transformer_kandinsky": "nablaT_v2",
    "diffusers.models.transformers.transformer_kandinsky6_sr": "nabla_block_mask",
}
_BLOCK = 64  # tokens
_BLOCKS_DIM = 2  # of the means [b, h, blocks, d]


class _GatherMeans(TorchFunctionMode):
    """Mode in which means over the tokens of this rank's blocks become those of all blocks."""

    def __init__(self, blocks: list[int], groups: str) -> None:
        super().__init__()
        self.count, self._blocks, self._groups = 0, blocks, groups

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not Tensor.mean:
            return result
        self.count += 1
        return gather_shards(result, _BLOCKS_DIM, self._blocks, self._groups)


def _choose(original: Callable[..., Any], session: Session, *args: Any, **kwargs: Any) -> Any:
    """Return the BlockMask of the whole sequence. The choice of blocks has no gradient.

    Ranks: all of the context group. Communication: the means of queries and of keys, 1/64 of each.
    Raises, on every rank: InterceptionError: patches. ShapeError: the shards do not consist of whole blocks.
    """
    call, modality = session.current(), session.model_plan.main
    if call.evaluation is not None:
        raise InterceptionError(
            "sparse_params (NABLA) cannot be used with patches (PipeFusion): leave it out, or set patches=1"
        )
    if call.row_tokens(modality) != _BLOCK:
        raise ShapeError(
            f"sta_mask is of {call.rows.get(modality)} blocks, but {call.lengths.get(modality)} {modality} tokens are "
            f"{call.lengths.get(modality, 0) / _BLOCK:g} blocks of {_BLOCK}: make it for the number of blocks"
        )
    means = _GatherMeans([n // _BLOCK for n in call.sizes_of(modality)], call.groups.name)
    with torch.no_grad(), means:
        mask = without_scope(original, *args, **kwargs)  # a wrapper around the original may call a stand-in
    if means.count != 2:
        raise InterceptionError(
            f"{original.__name__} computed {means.count} means, expected those of queries and of keys: this version "
            "of diffusers chooses blocks of keys in another way. Leave sparse_params out"
        )
    return mask


def _choose_across(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the stand-in for a function of `CHOOSERS`."""

    @wraps(original)
    def choose(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        scope = SCOPE.get()
        if scope is None or scope.attention is None:
            return original(query, key, *args, **kwargs)
        return uncompiled(_choose)(original, scope.session, query, key, *args, **kwargs)

    return choose


CHOOSING = dict.fromkeys(CHOOSERS.values(), _choose_across)  # what makes their stand-ins, by name
