"""Attention of a model that is computed in patches: keys of other patches come from the buffer of this call."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_cp.attention.buffered import attend_buffered
from lightning_cp.attention.call import Settings
from lightning_cp.engine.lengths import Sizes
from lightning_cp.engine.outer_masks import gather_token_mask, outer_mask, token_mask
from lightning_cp.engine.session import Session
from lightning_cp.errors import InterceptionError
from lightning_cp.plans import Attention


def attend_in_patches(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kind: Attention | None,
    *,
    sizes: Sizes,
    session: Session,
    settings: Settings,
) -> Tensor:
    """Compute one attention call of the current patch, or of the whole sequence, and fill its buffer.

    Args:
        query, key, value: [b, s_local, h, d], this rank's shard of the patch.
        kind: kind of attention, which gives the modalities of the keys; None: unknown.
        sizes: number of queries and of new keys on each rank.
    Ranks: all of the context group.
    Raises: InterceptionError: this kind of attention cannot be computed in patches.
    """
    call = session.current()
    evaluation = call.evaluation
    assert evaluation is not None, "the caller checks it"
    if torch.compiler.is_compiling():
        raise InterceptionError(
            "a model that is computed in patches cannot be compiled: do not compile it, or its blocks"
        )
    if settings.causal or kind is None or kind.form != "softmax":
        raise InterceptionError("causal, block-causal or ragged attention cannot be computed in patches: use patches=1")
    held = kind.queries if kind.keys is None else kind.keys
    modalities = tuple(modality for modality in evaluation.order if modality in held)
    ranges, total = call.ranges(modalities), sum(call.lengths.get(modality, 0) for modality in modalities)
    if mask is not None and kind.mask == "keys":
        mask = mask[..., :1, :]
    elif mask is not None and kind.mask == "padded":
        mask = mask[..., :total]
    elif mask is not None and kind.mask == "outer":
        own = token_mask(mask)
        new = gather_token_mask(own, sizes[1], session.groups)
        buffer = evaluation.next_keys()
        buffer.put([new.unsqueeze(-1)], [x for rank in ranges for x in rank], total)
        mask = outer_mask(own, buffer.tensors[0].squeeze(-1))
    return attend_buffered(
        query,
        key,
        value,
        mask,
        buffer=evaluation.next_keys(),
        ranges=ranges,
        total=total,
        q_lengths=sizes[0],
        settings=settings,
    )
