"""A sparse mask seen from one rank: tiles of its queries and of some keys, each empty, partial or full."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_cp.attention.sparse.mask import EMPTY, FULL, PARTIAL, SparseMask
from lightning_cp.attention.sparse.tables import EVALUATED, all_of, any_of
from lightning_cp.mesh.groups import Keeper

CUDA_TILE = 128  # of the CUDA kernel


@dataclass(frozen=True, eq=False)
class Tiles(Keeper):
    """Mask of some queries over some keys, in tiles of `size` queries and keys; the last ones may be smaller.

    Attributes:
        kinds: uint8 on the host, [batch or 1, heads or 1, tiles of queries, tiles of keys]: empty, partial or full.
        bits: bool [2 + partial tiles, *size]: the mask within tiles; bits[0] is empty, bits[1] full. Rows and columns
            after the last query or key are False.
        index: int32, shaped as `kinds`: the place of each tile in `bits`.
        lengths: number of queries and of keys.
    """

    kinds: Tensor
    bits: Tensor
    index: Tensor
    size: tuple[int, int]
    lengths: tuple[int, int]
    kept: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def is_empty(self) -> bool:
        """True if no query attends to a key."""
        return not bool(self.kinds.any())

    def dense(self, b: int, h: int, rows: slice, columns: Tensor | None = None) -> Tensor:
        """Return the mask of some tiles, bool [queries, keys].

        Args: rows: tiles of queries. columns: tiles of keys, ascending; None: all.
        """
        index = self.index[b, h, rows] if columns is None else self.index[b, h, rows][:, columns]
        tiles = self.bits[index.to(self.bits.device).long()]
        mask = tiles.transpose(1, 2).flatten(2).flatten(0, 1)
        last_column = self.kinds.shape[3]
        queries = min(rows.stop * self.size[0], self.lengths[0]) - rows.start * self.size[0]
        ends_last = columns is None or int(columns[-1]) == last_column - 1
        return mask[:queries, : mask.shape[1] - (last_column * self.size[1] - self.lengths[1] if ends_last else 0)]

    def whole(self) -> Tensor:
        """Return the whole mask, bool [batch or 1, heads or 1, queries, keys]."""
        batch, heads, rows, _ = self.kinds.shape
        masks = [torch.stack([self.dense(b, h, slice(0, rows)) for h in range(heads)]) for b in range(batch)]
        return torch.stack(masks)


def tiles_of(mask: SparseMask, queries: Tensor, keys: Tensor, *, heads: slice, device: torch.device) -> Tiles:
    """Find the kind of each tile of some queries and keys; evaluate the mask where the table does not decide.

    Args: queries, keys: positions, int64 on the host. heads: heads of the table.
    """
    size = (CUDA_TILE, CUDA_TILE) if device.type == "cuda" else mask.block_size
    table = mask.kinds[:, heads]
    shape = tuple(-(-len(x) // n) for x, n in zip((queries, keys), size, strict=True))
    if not (len(queries) and len(keys)):
        kinds = torch.zeros(*table.shape[:2], *shape, dtype=torch.uint8, device="cpu")
        bits = torch.zeros(2, *size, dtype=torch.bool, device=device)
        return Tiles(kinds, bits, kinds.int(), size, (len(queries), len(keys)))
    rows, columns = (
        _touched(x, n, b, m) for x, n, b, m in zip((queries, keys), size, mask.block_size, table.shape[2:], strict=True)
    )
    some = rows @ (table > EMPTY).type_as(rows) @ columns.T > 0
    every = rows @ (table < FULL).type_as(rows) @ columns.T == 0
    decided = rows @ (table != PARTIAL).type_as(rows) @ columns.T > 0  # the table decides some pairs of the tile
    kinds = some.to(torch.uint8) + (some & every).to(torch.uint8)
    places = (kinds == PARTIAL).nonzero()
    q, k = (_padded(x, n) for x, n in zip((queries, keys), size, strict=True))
    index, evaluated, found = kinds.int().div(FULL, rounding_mode="floor"), [], 2
    for group in torch.split(places, max(1, EVALUATED // (size[0] * size[1]))):
        b, h, i, j = group.unbind(1)
        partial = not bool(decided[b, h, i, j].any())
        inside = ((q[i] >= 0)[:, :, None] & (k[j] >= 0)[:, None]).to(mask.device)
        head = (h + heads.start)[:, None, None]
        positions = q[i].clamp(min=0)[:, :, None], k[j].clamp(min=0)[:, None]
        tile = mask.visible(b[:, None, None], head, *positions, in_partial_blocks=partial) & inside
        every_one, some_one = all_of(all_of(tile | ~inside, 1), 1).cpu(), any_of(any_of(tile, 1), 1).cpu()
        is_partial = some_one & ~every_one
        kinds[b, h, i, j] = (some_one.to(torch.uint8) + every_one.to(torch.uint8)).clamp_(max=FULL) * some_one
        index[b, h, i, j] = every_one.int() * some_one
        count = int(is_partial.sum())
        index[tuple(group[is_partial].unbind(1))] = torch.arange(found, found + count, dtype=torch.int32, device="cpu")
        found += count
        evaluated.append(tile[is_partial.to(tile.device)].to(device))
    empty = torch.zeros(1, *size, dtype=torch.bool, device=device)
    return Tiles(kinds, torch.cat([empty, ~empty, *evaluated]), index, size, (len(queries), len(keys)))


def _touched(positions: Tensor, tile: int, block: int, blocks: int) -> Tensor:
    """Return whether a tile of positions has one of a block, float [tiles, blocks]."""
    tiles = torch.arange(len(positions), device="cpu") // tile
    touched = torch.zeros(int(tiles[-1]) + 1, blocks, dtype=torch.float32, device="cpu")  # whatever the default dtype
    touched[tiles, positions // block] = 1
    return touched


def _padded(positions: Tensor, tile: int) -> Tensor:
    """Return positions in tiles, [tiles, tile], with -1 after the last."""
    return torch.nn.functional.pad(positions, (0, -len(positions) % tile), value=-1).view(-1, tile)
