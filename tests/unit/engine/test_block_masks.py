"""Handles of block masks, and the block masks that are refused."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from lightning_cp.attention.sparse.handles import handle_of, mask_of_handle
from lightning_cp.engine.attention.masks import handle_across
from lightning_cp.engine.session import Call
from lightning_cp.errors import InterceptionError, ShapeError
from lightning_cp.mesh.groups import SINGLE_RANK
from lightning_cp.plans import Attention


def _mask(mask_mod: Any = lambda b, h, q, k: q >= k) -> BlockMask:
    mask: BlockMask = create_block_mask(mask_mod, None, None, 9, 9, device="cpu", BLOCK_SIZE=4)
    return mask


def _dense(handle: torch.Tensor) -> torch.Tensor:
    mask = mask_of_handle(handle)
    zero, (queries, keys) = torch.zeros(1, dtype=torch.int64), mask.lengths
    return mask.visible(zero, zero, torch.arange(queries)[:, None], torch.arange(keys))


def test_a_handle_is_made_once_and_keeps_the_mask() -> None:
    mask = _mask()
    handle = handle_of(mask)
    assert handle_of(mask) is handle
    del mask
    gc.collect()
    assert torch.equal(_dense(handle), torch.ones(9, 9, dtype=torch.bool).tril())
    number = handle.clone()
    del handle
    with pytest.raises(ShapeError, match="was freed"):
        mask_of_handle(number)


def test_a_copy_with_another_function_has_another_mask() -> None:
    mask = _mask()
    handle = handle_of(mask)
    assert mask_of_handle(handle_of(copy.deepcopy(mask))) is mask_of_handle(handle)
    other = copy.copy(mask)
    other.mask_mod = lambda b, h, q, k: (q >= k) & (k > 0)
    assert not torch.equal(_dense(handle_of(other)), _dense(handle))


def _planned(kinds: tuple[Attention, ...], evaluation: Any = None) -> Any:
    call = Call(SINGLE_RANK, mock.Mock(), evaluation, defined={"text": 4, "image": 5})
    session = SimpleNamespace(current=lambda: call, model_plan=SimpleNamespace(patches=None))
    return session, kinds, None


_ORDERS = (Attention(("text", "image")), Attention(("image", "text")))


@pytest.mark.parametrize(
    ("planned", "sizes", "message"),
    [
        (_planned((), object()), ([9], [9]), "cannot be used with patches"),
        (_planned(_ORDERS[:1]), ([], []), "needs known numbers of queries and keys"),
        (_planned(_ORDERS), ([9], [9]), "other orders of tokens"),
    ],
)
def test_masks_that_do_not_fit_are_refused(planned: Any, sizes: Any, message: str) -> None:
    with pytest.raises(InterceptionError, match=message):
        handle_across(_mask(), *planned, sizes)
