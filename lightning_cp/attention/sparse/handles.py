"""Handles: tensors that represent sparse masks in the arguments of operators.

A compiled graph gets a handle as an input, so one graph serves all masks of a call.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lightning_cp.attention.sparse.mask import MASK, SparseMask
from lightning_cp.compat.compiler import uncompiled
from lightning_cp.errors import ShapeError

_HANDLE = "_lightning_cp_handle"
_LIBRARY = torch.library.Library("lightning_cp", "FRAGMENT")  # type: ignore[no-untyped-call]
_numbers = itertools.count(secrets.randbits(40) << 20)  # so that a number of another process is no mask here
_by_number: WeakValueDictionary[int, SparseMask] = WeakValueDictionary()


def is_block_mask(value: object) -> bool:
    """Return True for a BlockMask of torch and for a SparseMask."""
    return isinstance(value, (BlockMask, SparseMask))


def handle_of(block_mask: Any) -> Tensor:
    """Return the handle of a `BlockMask` or `SparseMask`. It keeps the mask alive, and is an attribute of a SparseMask.

    In compiled code, the first use of a mask is a graph break, unless `handle_of` was called for it before.
    Raises: TypeError: it is no block mask.
    """
    mask = block_mask if isinstance(block_mask, SparseMask) else getattr(block_mask, MASK, None)
    handle = getattr(mask, _HANDLE, None)
    if isinstance(handle, Tensor) and (torch.compiler.is_compiling() or _is_current(block_mask)):
        return handle
    made: Tensor = uncompiled(_add_handle)(block_mask)
    return made


def _is_current(block_mask: Any) -> bool:
    """Return False for a copy of a block mask that was given another `mask_mod`."""
    return isinstance(block_mask, SparseMask) or getattr(block_mask, MASK).mask_mod is block_mask.mask_mod


def _add_handle(block_mask: Any) -> Tensor:
    mask = SparseMask.from_block_mask(block_mask)
    handle = new_handle(mask)
    setattr(mask, _HANDLE, handle)
    return handle


def new_handle(mask: SparseMask) -> Tensor:
    """Return a new handle. It refers to a copy of the mask, so that a mask that has a handle is no reference cycle."""
    number = mask.memoize("number", lambda: next(_numbers))
    shared = _by_number.get(number)
    if shared is None:
        shared = _by_number[number] = mask.copy(keeps=True)
    with torch.inference_mode(False):  # it may be saved for a backward pass later
        handle = torch.tensor(number, dtype=torch.int64, device="cpu")
    setattr(handle, MASK, shared)
    return handle


def mask_of_handle(handle: Tensor) -> SparseMask:
    """Return the mask of a handle. Raises: ShapeError: it was freed, or is of another process."""
    mask = _by_number.get(int(handle))
    if mask is None:
        raise ShapeError(
            "the block mask of this attention was freed before its gradient was computed: keep a reference to it until "
            "the backward pass has ended. (A model that was exported with a mask can only be used in the same process)"
        )
    return mask


def _select(handle: Tensor, queries: Sequence[int], keys: Sequence[int]) -> Tensor:
    mask, facts = mask_of_handle(handle), (tuple(queries), tuple(keys))
    mask.check_source()

    def build() -> SparseMask:
        orders = [
            torch.arange(n, device="cpu") if order is None else order for order, n in zip(mask.orders, mask.lengths)
        ]
        queries, keys = (x if places is None else x[places] for x, places in zip(orders, map(_positions, facts)))
        return mask.in_order(queries, keys) if len(queries) == mask.lengths[0] else mask.of_queries(queries)

    return new_handle(mask.memoize(("selected", *facts), build))


def _positions(places: Sequence[int]) -> Tensor | None:
    if not places:
        return None
    return torch.cat([torch.arange(a, a + n, device="cpu") for a, n in zip(places[::2], places[1::2], strict=True)])


_LIBRARY.define(  # type: ignore[no-untyped-call]
    "select_block_mask(Tensor handle, SymInt[] queries, SymInt[] keys) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_LIBRARY.impl("select_block_mask", _select, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


@torch.library.register_fake("lightning_cp::select_block_mask", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(handle: Tensor, queries: Sequence[int], keys: Sequence[int]) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def select(handle: Tensor, queries: Sequence[int], keys: Sequence[int]) -> Tensor:
    """Return the handle of a mask for tokens in the order in which ranks hold them, or for some of the queries.

    The selected mask is kept with the original, and made once.

    Args: queries, keys: ranges of places in the mask's order, each as its first place and its length; empty: all,
        ascending.
    """
    if not (queries or keys):
        return handle
    selected: Tensor = torch.ops.lightning_cp.select_block_mask(handle, list(queries), list(keys))
    return selected
