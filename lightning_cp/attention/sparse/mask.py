"""Sparse masks over a whole sequence: a function of positions, and a table that says which blocks are empty or full."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Hashable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lightning_cp.comm.shards import checked_order
from lightning_cp.errors import ShapeError
from lightning_cp.mesh.groups import Memo

# (sample, head, position of the query, position of the key) -> True if the query attends to the key. All are int64
# tensors that can be broadcast to each other, and so must the result be.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
EVALUATED = 1 << 17  # pairs for which a mask function is called at a time, so that its tensors stay in the CPU's caches
EMPTY, PARTIAL, FULL = 0, 1, 2
MASK = "_lightning_cp_mask"  # attribute of a BlockMask, and of a handle: its SparseMask
_SAMPLED = 4096  # pairs of positions that enter the checksum of a mask, besides its table


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


class SparseMask(Memo):
    """Mask of a whole sequence, in positions of that sequence, for `context_parallel_attention(block_mask=…)`.

    Made by `from_block_mask`, `from_mask_mod` and `from_documents`. Do not change it, or tensors that `mask_mod`
    captures, after its first use: what was derived from it is kept. It is no dataclass, because Lightning rebuilds the
    dataclasses in a batch and in a module's inputs, and refuses frozen ones.

    Attributes:
        mask_mod: see `MaskMod`; read only in partial blocks.
        kinds: uint8 on the host, [batch or 1, heads or 1, blocks of queries, blocks of keys]: 0 (no query of the block
            attends to a key), 1 (`mask_mod` decides) or 2 (all attend to all).
        lengths: number of queries and of keys.
        block_size: number of queries and of keys in a block, at most `lengths`.
        device: device on which `mask_mod` is called.
        orders: position of each query and of each key, int64 on the host, in the order in which ranks hold them (all
            of rank 0, then of rank 1, …); None: ascending. See `in_order`.
        memo: what was derived from the mask, see `memoize`. Neither copied nor pickled.
        source: the BlockMask from which the mask was made, or None.
    """

    def __init__(
        self,
        mask_mod: MaskMod,
        kinds: Tensor,
        lengths: tuple[int, int],
        block_size: tuple[int, int],
        device: torch.device,
        orders: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        self.mask_mod, self.kinds, self.lengths, self.device, self.orders = mask_mod, kinds, lengths, device, orders
        self.block_size = min(block_size[0], max(lengths[0], 1)), min(block_size[1], max(lengths[1], 1))
        self.memo: dict[Hashable, Any] = {}
        self.source: Callable[[], Any] = lambda: None

    @staticmethod
    def from_block_mask(block_mask: Any) -> SparseMask:
        """Take the table and `mask_mod` of a `torch.nn.attention.flex_attention.BlockMask` over a whole sequence.

        Equal for the same object. A block mask without `mask_mod` attends to all pairs in its blocks.
        Raises: TypeError: it is no BlockMask.
        """
        if isinstance(block_mask, SparseMask):
            return block_mask
        try:
            kept: SparseMask | None = getattr(block_mask, MASK, None)
            if kept is not None and kept.mask_mod is block_mask.mask_mod:
                return kept
            counts, indices = block_mask.kv_num_blocks, block_mask.kv_indices
            full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
            lengths, size, mask_mod = tuple(block_mask.seq_lengths), tuple(block_mask.BLOCK_SIZE), block_mask.mask_mod
        except AttributeError:
            raise TypeError(
                f"block_mask is a {type(block_mask).__name__}: it must be a BlockMask "
                "(torch.nn.attention.flex_attention.create_block_mask) or a lightning_cp.SparseMask"
            ) from None
        key_blocks = -(-lengths[1] // size[1])
        kinds = dense_table(counts, indices, key_blocks).to(torch.uint8)
        if full[0] is not None:
            kinds = torch.where(dense_table(*full, key_blocks), FULL, kinds).to(torch.uint8)
        kinds = kinds[:, :, : -(-lengths[0] // size[0])].cpu()
        mask = SparseMask(mask_mod, kinds, lengths, size, counts.device)
        mask.source = weakref.ref(block_mask)
        setattr(block_mask, MASK, mask)
        return mask

    @staticmethod
    def from_mask_mod(
        mask_mod: MaskMod,
        queries: int,
        keys: int | None = None,
        *,
        batch: int = 1,
        heads: int = 1,
        block_size: int | tuple[int, int] = 128,
        device: torch.device | str = "cpu",
    ) -> SparseMask:
        """Find the kind of each block by calling `mask_mod` for all pairs, one row of blocks at a time.

        Args:
            queries, keys: lengths of the whole sequence; None: as many keys as queries.
            batch, heads: 1: the mask is the same for all samples, or heads.
            device: that of the tensors that `mask_mod` captures.
        Raises: ShapeError: `mask_mod` returns no bool tensor that can be broadcast to [batch, heads, queries, keys], or
            a block size is not positive.
        """
        keys = queries if keys is None else keys
        size = _checked_size(block_size)
        size = min(size[0], max(queries, 1)), min(size[1], max(keys, 1))
        kinds = table_of(mask_mod, (batch, heads, queries, keys), size, torch.device(device))
        return SparseMask(mask_mod, kinds.cpu(), (queries, keys), size, torch.device(device))

    @staticmethod
    def from_documents(documents: Tensor, *, block_size: int = 128) -> SparseMask:
        """Let each token attend to the tokens of its own document.

        Args: documents: number of each token's document, int [tokens] or [batch, tokens]; it is copied. Blocks are
            cheap to find and many are empty if the tokens of a document are neighbours.
        """
        ids = documents[None] if documents.ndim == 1 else documents
        if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ShapeError(
                f"documents {tuple(documents.shape)} of {documents.dtype} must be ints, [tokens] or [batch, tokens]"
            )
        ids, shared = ids.to(torch.int64, copy=True), len(ids) == 1
        block_size = min(_checked_size(block_size)[0], max(ids.shape[1], 1))

        def same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            sample = torch.zeros_like(b) if shared else b
            return ids[sample, q] == ids[sample, k]

        blocks = torch.nn.functional.pad(
            ids, (0, -ids.shape[1] % block_size), mode="replicate" if ids.numel() else "constant"
        )
        blocks = blocks.view(len(ids), -(-ids.shape[1] // block_size), block_size)
        low, high = blocks.amin(2), blocks.amax(2)
        overlap = (low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None])
        uniform = (low == high)[:, :, None] & (low == high)[:, None]
        kinds = (overlap.to(torch.uint8) + (overlap & uniform).to(torch.uint8))[:, None].cpu()
        return SparseMask(same_document, kinds, (ids.shape[1],) * 2, (block_size, block_size), ids.device)

    def in_order(self, queries: Tensor | None, keys: Tensor | None = None) -> SparseMask:
        """Return the mask for tokens that ranks hold in another order than the sequence's.

        Args:
            queries: position in the sequence of each query, in the order of the ranks' shards, int [queries]; None:
                ascending.
            keys: the same for keys; None: as `queries`.
        Raises: ShapeError: an order does not hold each position once.
        """
        orders = (queries, queries if keys is None and self.lengths[0] == self.lengths[1] else keys)
        checked = [
            None if order is None else checked_order(name, order, length)
            for name, order, length in zip(("queries", "keys"), orders, self.lengths, strict=True)
        ]
        other = self.copy(keeps=False)
        other.orders = checked[0], checked[1]
        return other

    def of_queries(self, positions: Tensor) -> SparseMask:
        """Return the mask of some queries over all keys, which keep their order.

        Args: positions: positions of these queries, int64 on the host.
        """
        rows = torch.split(self.kinds[:, :, positions // self.block_size[0]], self.block_size[0], 2)
        kinds = [torch.where((x == x[:, :, :1]).all(2), x[:, :, 0], PARTIAL).to(torch.uint8) for x in rows]

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return self.visible(b, h, positions.to(q.device)[q], k)

        lengths = len(positions), self.lengths[1]
        kinds_of_rows = torch.stack(kinds, 2)
        return SparseMask(visible, kinds_of_rows, lengths, self.block_size, self.device, (None, self.orders[1]))

    @property
    def area(self) -> float:
        """Share of the pairs of blocks that are not empty: the work, relative to attention without a mask."""
        return self.kinds.bool().double().mean().item() if self.kinds.numel() else 0.0

    @cached_property
    def checksum(self) -> int:
        """Checksum of the lengths, orders, table, and of `mask_mod` for some pairs in partial blocks."""
        facts = repr((self.lengths, self.block_size, tuple(self.kinds.shape))).encode()
        value = zlib.crc32(facts)
        for x in (self.kinds, *self.orders):
            value = zlib.crc32(b"" if x is None else x.numpy().tobytes(), value)
        undecided = (self.kinds == PARTIAL).nonzero()
        if len(undecided):
            chosen = torch.arange(_SAMPLED, device="cpu") * len(undecided) // _SAMPLED
            b, h, i, j = undecided[chosen].unbind(1)
            draw = partial(torch.randint, size=(_SAMPLED,), generator=torch.Generator().manual_seed(0), device="cpu")
            q, k = (x * n + draw(n) for x, n in zip((i, j), self.block_size, strict=True))
            q, k = q.clamp_(max=self.lengths[0] - 1), k.clamp_(max=self.lengths[1] - 1)
            value = zlib.crc32(self.visible(b, h, q, k).expand(_SAMPLED).cpu().numpy().tobytes(), value)
        return value

    def visible(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *, in_partial_blocks: bool = False) -> Tensor:
        """Return whether queries attend to keys.

        Args:
            b, h, q, k: ints that can be broadcast: sample, head and positions.
            in_partial_blocks: all pairs lie in partial blocks, so the table is not read, which takes most of the time.
        """
        b, h, q, k = (x.to(self.device) for x in (b, h, q, k))
        if in_partial_blocks:
            return call_mask_mod(self.mask_mod, b, h, q, k)
        kinds = self.memoize("kinds", lambda: self.kinds.to(self.device))
        b_of_table, h_of_table = (x.clamp(max=n - 1) for x, n in zip((b, h), kinds.shape, strict=False))
        table = kinds[b_of_table, h_of_table, q // self.block_size[0], k // self.block_size[1]]
        return (call_mask_mod(self.mask_mod, b, h, q, k) & (table > EMPTY)) | (table == FULL)

    def check_source(self) -> None:
        """Check that the BlockMask still has its `mask_mod`: compiled code cannot see it. Raises: ShapeError."""
        source = self.source()
        if source is not None and source.mask_mod is not self.mask_mod:
            raise ShapeError("mask_mod of a BlockMask was replaced after its first use: make a new BlockMask")

    def check_shapes(self, batch: int, heads: int, queries: int, keys: int) -> None:
        """Check the sizes of a call, with the numbers of queries and keys of all ranks. Raises: ShapeError."""
        of_batch, of_heads = self.kinds.shape[:2]
        if of_batch not in (1, batch) or of_heads not in (1, heads) or self.lengths != (queries, keys):
            raise ShapeError(
                f"block_mask is of batch {of_batch}, {of_heads} heads, {self.lengths[0]} queries and {self.lengths[1]} "
                f"keys, but attention has batch {batch}, {heads} heads, {queries} queries and {keys} keys on all ranks "
                "together: make it for the whole sequence, with 1 or all samples and heads"
            )

    @property
    def _facts(self) -> tuple[Any, ...]:
        return self.mask_mod, self.kinds, self.lengths, self.block_size, self.device, self.orders

    def copy(self, *, keeps: bool) -> SparseMask:
        """Return another object for the same mask. Args: keeps: share `memo`."""
        other = SparseMask(*self._facts)
        if keeps:
            other.memo, other.source = self.memo, self.source
        return other

    def __deepcopy__(self, memo: object) -> SparseMask:
        return self

    def __reduce__(self) -> tuple[type[SparseMask], tuple[Any, ...]]:
        return SparseMask, self._facts  # numbers of handles are those of one process

    def __repr__(self) -> str:
        return f"SparseMask(lengths={self.lengths}, block_size={self.block_size}, area={self.area:.3f})"


def _checked_size(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """Return the number of queries and of keys in a block. Raises: ShapeError: they are not positive ints."""
    size = (block_size, block_size) if isinstance(block_size, int) else block_size
    if not (isinstance(size, tuple) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)):
        raise ShapeError(f"block_size={block_size!r} must be a positive int, or two of them (queries, keys)")
    return size
