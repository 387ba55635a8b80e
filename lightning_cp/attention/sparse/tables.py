"""Evaluate mask functions, and find the table of blocks that are empty, partial or full."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_cp.errors import ShapeError

# (sample, head, position of the query, position of the key) -> True if the query attends to the key. All are int64
# tensors that can be broadcast to each other, and so must the result be.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
EVALUATED = 1 << 17  # pairs for which a mask function is called at a time, so that its tensors stay in the CPU's caches


def table_of(
    mask_mod: MaskMod, shape: tuple[int, int, int, int], size: tuple[int, int], device: torch.device
) -> Tensor:
    """Find the kind of each block by calling `mask_mod` for all pairs.

    Args: shape: batch, heads, number of queries, number of keys. size: tokens per block.
    Returns: see `SparseMask.kinds`.
    """
    batch, heads, queries, keys = shape
    if not (queries and keys):
        return torch.zeros(batch, heads, 0, 0, dtype=torch.uint8, device="cpu")
    b = torch.arange(batch, device=device)[:, None, None, None]
    h = torch.arange(heads, device=device)[:, None, None]
    columns = torch.split(torch.arange(keys, device=device), max(1, EVALUATED // (batch * heads * size[0])))
    some, every = [], []  # of each row of blocks: [batch, heads, keys]
    for q in torch.split(torch.arange(queries, device=device), size[0]):
        seen = [call_mask_mod(mask_mod, b, h, q[:, None], k).expand(batch, heads, len(q), len(k)) for k in columns]
        some.append(torch.cat([any_of(x, 2) for x in seen], 2))
        every.append(torch.cat([all_of(x, 2) for x in seen], 2))
    kinds = torch.zeros(batch, heads, len(some), -(-keys // size[1]), dtype=torch.uint8, device=device)
    for rows, rest in ((some, False), (every, True)):
        padded = torch.nn.functional.pad(torch.stack(rows, 2), (0, -keys % size[1]), value=rest)
        by_block = padded.view(*kinds.shape, size[1])
        kinds += by_block.all(4) if rest else by_block.any(4)
    return kinds


def dense_table(counts: Tensor, indices: Tensor, key_blocks: int) -> Tensor:
    """Return bool [b, h, rows, key_blocks] from the number of blocks in each row, and their indices."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    table = torch.zeros(*counts.shape, key_blocks + 1, dtype=torch.bool, device=indices.device)
    places = torch.where(listed, indices, key_blocks).long().clamp_(max=key_blocks)
    return table.scatter_(-1, places, True)[..., :key_blocks]


def call_mask_mod(mask_mod: MaskMod, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Call `mask_mod` with tensors that are broadcast. Raises: ShapeError: the result is no such tensor."""
    shape = torch.broadcast_shapes(b.shape, h.shape, q.shape, k.shape)  # type: ignore[no-untyped-call]
    try:
        result = mask_mod(b, h, q, k)
        if result.dtype != torch.bool:
            raise TypeError(f"it returned {result.dtype}, not bool")
        return result.expand(shape)
    except (AttributeError, IndexError, RuntimeError, TypeError) as error:
        raise ShapeError(
            f"mask_mod cannot be called with int64 tensors (sample, head, query, key) of shapes {tuple(b.shape)}, "
            f"{tuple(h.shape)}, {tuple(q.shape)} and {tuple(k.shape)}: {error}. It must return a bool tensor that "
            "broadcasts to them, and use operations that broadcast"
        ) from error


def any_of(x: Tensor, dim: int) -> Tensor:
    """Return `x.any(dim)` of bools; 20 times as fast on CPU."""
    return x.view(torch.uint8).amax(dim).bool()


def all_of(x: Tensor, dim: int) -> Tensor:
    """Return `x.all(dim)` of bools, see `any_of`."""
    return x.view(torch.uint8).amin(dim).bool()
