"""Sparse masks: tables, orders, errors, checksums, balance, and how long a mask lives."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from lightning_cp import ContextParallelConfig, SparseMask, context_parallel_attention
from lightning_cp.attention.sparse import balanced_order, imbalance
from lightning_cp.attention.sparse.mask import EMPTY, FULL
from lightning_cp.attention.sparse.tiles import tiles_of
from lightning_cp.comm.shards import shard_sizes
from lightning_cp.errors import ShapeError

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
MODS: dict[str, MaskMod] = {
    "frames": lambda b, h, q, k: q // 30 >= k // 30,
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q - k).abs() < 40,
    "strided": lambda b, h, q, k: (q - k) % 7 == 0,
    "nothing": lambda b, h, q, k: (q < 0) & (k < 0),
    "all": lambda b, h, q, k: (q >= 0) & (k >= 0),
}
OF_EACH: MaskMod = lambda b, h, q, k: (q - k).abs() < 20 * (h + 1) + 30 * b  # noqa: E731
CONFIG = ContextParallelConfig()


def _dense(mask: SparseMask) -> Tensor:
    """The mask of all pairs, [batch or 1, heads or 1, queries, keys], as attention reads it."""
    queries, keys = (torch.arange(n) for n in mask.lengths)
    return tiles_of(mask, queries, keys, heads=slice(0, mask.kinds.shape[1]), device=torch.device("cpu")).whole()


def _expected(mod: MaskMod, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    return mod(b, h, torch.arange(queries)[:, None], torch.arange(keys)).expand(batch, heads, queries, keys)


@pytest.mark.parametrize("block", [16, 48])
@pytest.mark.parametrize("name", MODS)
def test_a_block_mask_of_torch_gives_the_same_mask(name: str, block: int) -> None:
    queries, keys = 130, 200  # no multiples of the block
    torchs = create_block_mask(MODS[name], None, None, queries, keys, device="cpu", BLOCK_SIZE=block)
    mask, direct = (
        SparseMask.from_block_mask(torchs),
        SparseMask.from_mask_mod(MODS[name], queries, keys, block_size=block),
    )
    assert torch.equal(_dense(mask), _expected(MODS[name], 1, 1, queries, keys))
    assert torch.equal(_dense(direct), _expected(MODS[name], 1, 1, queries, keys))
    assert torch.equal(mask.kinds > EMPTY, torchs.to_dense().bool())
    rows = torch.split(_expected(MODS[name], 1, 1, queries, keys)[0, 0], block)
    blocks = [[int(x.any()) + int(x.all()) for x in torch.split(row, block, 1)] for row in rows]
    assert direct.kinds[0, 0].tolist() == blocks
    assert (mask.kinds <= direct.kinds).all(), "torch may mark blocks at the edge as partial"
    assert (mask.lengths, mask.block_size) == ((queries, keys), (block, block))
    assert SparseMask.from_block_mask(torchs) is mask, "found once"
    assert SparseMask.from_block_mask(mask) is mask


def test_a_block_mask_of_samples_and_heads_gives_the_same_mask() -> None:
    torchs = create_block_mask(OF_EACH, 2, 3, 100, 100, device="cpu", BLOCK_SIZE=16)
    mask, expected = SparseMask.from_block_mask(torchs), _expected(OF_EACH, 2, 3, 100, 100)
    direct = SparseMask.from_mask_mod(OF_EACH, 100, batch=2, heads=3, block_size=16)
    assert mask.kinds.shape == direct.kinds.shape == (2, 3, 7, 7)
    assert torch.equal(_dense(mask), expected)
    assert torch.equal(_dense(direct), expected)


def test_a_block_mask_without_a_function_attends_to_whole_blocks() -> None:
    table = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)[None, None]
    indices = table.int().argsort(dim=-1, descending=True, stable=True).int()
    torchs = BlockMask.from_kv_blocks(table.sum(-1).int(), indices, BLOCK_SIZE=16, seq_lengths=(40, 44))
    mask = SparseMask.from_block_mask(torchs)
    assert torch.equal(mask.kinds > EMPTY, table)
    assert torch.equal(_dense(mask), table.repeat_interleave(16, 2).repeat_interleave(16, 3)[:, :, :40, :44])
    assert mask.area == 5 / 9


@pytest.mark.parametrize("kind", ["sorted", "unsorted", "samples"])
def test_documents_equal_their_function(kind: str) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 5, (3, 150) if kind == "samples" else (150,)) - 2
    ids = ids.sort()[0] if kind != "unsorted" else ids
    mask, batch = SparseMask.from_documents(ids, block_size=16), 3 if kind == "samples" else 1
    of_samples = ids.view(batch, -1)
    expected = (of_samples[:, :, None] == of_samples[:, None])[:, None]
    assert torch.equal(_dense(mask), expected)
    exact = SparseMask.from_mask_mod(
        lambda b, h, q, k: of_samples[b, q] == of_samples[b, k], 150, batch=batch, block_size=16
    )
    assert not ((mask.kinds == EMPTY) & (exact.kinds > EMPTY)).any(), "no block is wrongly empty"
    assert not ((mask.kinds == FULL) & (exact.kinds < FULL)).any(), "or wrongly full"
    assert kind == "unsorted" or torch.equal(mask.kinds > EMPTY, exact.kinds > EMPTY)


def test_a_mask_in_another_order_is_the_same_mask() -> None:
    mask = SparseMask.from_mask_mod(MODS["causal"], 50, block_size=8)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    q, k, v = (torch.randn(1, 50, 2, 4, dtype=torch.float64) for _ in range(3))
    expected = context_parallel_attention(q, k, v, parallel_config=CONFIG, block_mask=mask)
    moved = [x[:, order] for x in (q, k, v)]
    found = context_parallel_attention(*moved, parallel_config=CONFIG, block_mask=mask.in_order(order))  # type: ignore[misc]
    torch.testing.assert_close(found, expected[:, order])
    few = SparseMask.from_mask_mod(MODS["causal"], 20, 50, block_size=8).in_order(None, order)
    found = context_parallel_attention(q[:, :20], *moved[1:], parallel_config=CONFIG, block_mask=few)  # type: ignore[misc]
    torch.testing.assert_close(found, expected[:, :20], msg="an order of the keys only")


@pytest.mark.parametrize("order", [torch.arange(49), torch.zeros(50, dtype=torch.int64), torch.arange(1, 51)])
def test_an_order_must_hold_each_position_once(order: Tensor) -> None:
    mask = SparseMask.from_mask_mod(MODS["causal"], 50)
    with pytest.raises(ShapeError, match=r"the order of queries .* must hold each position from 0 to 49 once"):
        mask.in_order(order)


@pytest.mark.parametrize(
    ("mod", "said"),
    [
        (lambda b, h, q, k: (q >= k).int(), "it returned torch.int32, not bool"),
        (lambda b, h, q, k: (q >= k)[..., :-1], "It must return a bool tensor that broadcasts"),
        (lambda b, h, q, k: True, "no attribute 'dtype'"),
        (lambda b, h, q, k: q >= k if q > k else k > q, "use operations that broadcast"),
        (lambda b, h, q, k: torch.ones(5, dtype=torch.bool)[q] & (k > 0), "out of bounds"),
    ],
)
def test_a_wrong_mask_function_is_named(mod: Any, said: str) -> None:
    with pytest.raises(ShapeError, match="mask_mod cannot be called with int64 tensors") as error:
        SparseMask.from_mask_mod(mod, 50)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "ids", [torch.zeros(4), torch.zeros(4, dtype=torch.bool), torch.zeros(1, 2, 3, dtype=torch.int64)]
)
def test_documents_must_be_numbers_of_tokens(ids: Tensor) -> None:
    with pytest.raises(ShapeError, match=r"must be ints, \[tokens\] or \[batch, tokens\]"):
        SparseMask.from_documents(ids)


@pytest.mark.parametrize(
    ("mask", "others", "kind", "said"),
    [
        (
            SparseMask.from_mask_mod(MODS["causal"], 9),
            {},
            ShapeError,
            "9 queries and 9 keys, but attention has batch 1",
        ),
        (create_block_mask(MODS["causal"], None, None, 9, 8, "cpu"), {}, ShapeError, "9 queries and 8 keys"),
        (SparseMask.from_mask_mod(MODS["causal"], 8, heads=3), {}, ShapeError, "3 heads, 8 queries"),
        (SparseMask.from_mask_mod(MODS["causal"], 8, batch=2), {}, ShapeError, "of batch 2"),
        (SparseMask.from_mask_mod(MODS["causal"], 8), {"is_causal": True}, ShapeError, "block_mask and is_causal=True"),
        (
            SparseMask.from_mask_mod(MODS["causal"], 8),
            {"attn_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)},
            ShapeError,
            "block_mask and attn_mask cannot be used together",
        ),
        (torch.ones(8, 8), {}, TypeError, "block_mask is a Tensor: it must be a BlockMask"),
    ],
)
def test_a_mask_that_does_not_fit_a_call_is_an_error(mask: Any, others: dict[str, Any], kind: Any, said: str) -> None:
    x = torch.randn(1, 8, 2, 4)
    with pytest.raises(kind, match=said):
        context_parallel_attention(x, x, x, parallel_config=CONFIG, block_mask=mask, **others)


def test_different_masks_have_different_checksums() -> None:
    masks = [SparseMask.from_mask_mod(mod, 300, block_size=16) for mod in MODS.values()]
    first = masks[0]
    masks += [SparseMask.from_mask_mod(MODS["frames"], n, block_size=16) for n in (299, 301)]
    masks += [SparseMask.from_mask_mod(MODS["frames"], 300, block_size=32), first.in_order(torch.arange(300).flip(0))]
    masks += [SparseMask.from_mask_mod(lambda b, h, q, k: (q - k) % 5 == 0, 300, block_size=16)]  # no table decides
    for width in (2, 3):  # few pairs differ, and no block does
        masks.append(SparseMask.from_mask_mod(lambda b, h, q, k, w=width: (q - k).abs() < w, 300))
    masks += [SparseMask.from_mask_mod(OF_EACH, 300, heads=n, block_size=16) for n in (1, 2)]
    checksums = [mask.checksum for mask in masks]
    assert len(set(checksums)) == len(masks)
    assert SparseMask.from_mask_mod(MODS["frames"], 300, block_size=16).checksum == first.checksum


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("kind", ["frames", "one large document"])
def test_uneven_work_is_balanced(kind: str, ranks: int) -> None:
    tokens = 960
    mask = SparseMask.from_mask_mod(MODS["frames"], tokens, block_size=30)
    if kind == "one large document":
        mask = SparseMask.from_documents(torch.arange(tokens).clamp(min=600) // 20, block_size=20)
    sizes = shard_sizes(tokens, ranks)
    order = balanced_order(mask, ranks)
    assert imbalance(mask, sizes) > 1.3
    assert order is not None
    assert torch.equal(order.sort()[0], torch.arange(tokens))
    assert imbalance(mask.in_order(order), sizes) <= 1.1


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_even_work_keeps_its_order(ranks: int) -> None:
    mask = SparseMask.from_mask_mod(MODS["window"], 960, block_size=20)
    assert balanced_order(mask, ranks) is None
    assert imbalance(mask, shard_sizes(960, ranks)) <= 1.1


def test_only_a_square_mask_without_an_order_is_balanced() -> None:
    for mask in (
        SparseMask.from_mask_mod(MODS["causal"], 8, 9),
        SparseMask.from_mask_mod(MODS["causal"], 8).in_order(torch.arange(8)),
    ):
        with pytest.raises(ValueError, match="only a mask with as many queries as keys, in ascending order"):
            balanced_order(mask, 2)


def test_a_mask_is_freed_with_its_last_reference() -> None:
    """Without the garbage collector: masks hold tiles on a GPU, one for each size of batch."""
    gc.collect()
    gc.disable()
    try:
        mask = SparseMask.from_mask_mod(MODS["causal"], 40, block_size=8)
        torchs = create_block_mask(MODS["window"], None, None, 40, 40, device="cpu", BLOCK_SIZE=16)
        references = weakref.ref(mask), weakref.ref(SparseMask.from_block_mask(torchs))
        for block_mask in (mask, torchs):
            x = torch.randn(1, 40, 2, 4, requires_grad=True)
            out = context_parallel_attention(x, x, x, parallel_config=CONFIG, block_mask=block_mask)
            torch.autograd.grad(out.sum(), x)
        assert all(reference() is not None for reference in references)
        del mask, torchs, block_mask, out, x
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()
