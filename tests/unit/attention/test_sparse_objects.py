"""Sparse masks as objects: modes of autograd, copies, pickles, batches, later changes, orders, block sizes, devices."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from lightning_cp import ContextParallelConfig, SparseMask, context_parallel_attention
from lightning_cp.attention.sparse import balanced_order, handles
from lightning_cp.attention.sparse.handles import handle_of, mask_of_handle, select
from lightning_cp.errors import ShapeError

TOKENS = 24
CONFIG = ContextParallelConfig()


def frames(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q // 3 >= k // 3


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k).abs() < 2


def _sparse(mod: Callable[..., Tensor] = frames) -> SparseMask:
    return SparseMask.from_mask_mod(mod, TOKENS, block_size=8)


def _block_mask(mod: Callable[..., Tensor] = frames) -> BlockMask:
    return create_block_mask(mod, None, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=8)


def _attend(mask: Any) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, TOKENS, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    qkv = [x.requires_grad_(torch.is_grad_enabled()) for x in qkv]
    return context_parallel_attention(*qkv, parallel_config=CONFIG, block_mask=mask), qkv


def _check(mask: Any, mod: Callable[..., Tensor]) -> None:
    """Compare output and gradients with dense attention."""
    out, qkv = _attend(mask)
    at, none = torch.arange(TOKENS), torch.zeros(())
    query, key, value = (x.transpose(1, 2) for x in qkv)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mod(none, none, at[:, None], at))
    expected = expected.transpose(1, 2)
    grads = [torch.autograd.grad(x.square().sum(), qkv) for x in (out, expected)]
    for found, other in zip((out, *grads[0]), (expected, *grads[1]), strict=True):
        torch.testing.assert_close(found, other, rtol=0, atol=1e-12)


def _attend_to_itself(x: Tensor, mask: Any) -> Tensor:
    return context_parallel_attention(x, x, x, parallel_config=CONFIG, block_mask=mask)


@pytest.mark.parametrize("make", [_sparse, _block_mask])
def test_a_mask_used_in_inference_mode_trains_later(make: Callable[[], Any]) -> None:
    mask = make()
    with torch.inference_mode():
        _attend(mask)
    _check(mask, frames)


@pytest.mark.parametrize("make", [_sparse, _block_mask])
def test_a_pickled_mask_is_no_other_mask_in_another_process(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mask, other = make(), _sparse(window)
    number = int(handle_of(mask))
    data = pickle.dumps(mask)
    monkeypatch.setitem(handles._by_number, number, other)  # as if another process gave the number to another mask
    _check(pickle.loads(data), frames)


def test_a_mask_passes_unchanged_through_lightnings_batches() -> None:
    mask = _sparse()
    assert move_data_to_device({"mask": mask}, torch.device("cpu"))["mask"] is mask
    assert apply_to_collection([mask], function=lambda x: x.bfloat16(), dtype=Tensor)[0] is mask


def test_a_handle_of_another_process_is_no_mask_here() -> None:
    assert int(handle_of(_sparse())) >> 20, "numbers begin at a random one: exported models contain them"
    with pytest.raises(ShapeError, match="exported"):
        mask_of_handle(torch.tensor(1))


def test_a_replaced_mask_mod_is_used_and_raises_in_compiled_code() -> None:
    mask = create_block_mask(frames, None, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=TOKENS)  # one partial block
    torch._dynamo.reset()
    compiled = torch.compile(_attend_to_itself, backend="eager")
    _check(mask, frames)
    x = torch.randn(1, TOKENS, 2, 4)
    compiled(x, mask)
    mask.mask_mod = window
    with pytest.raises(ShapeError, match="mask_mod of a BlockMask was replaced"):
        compiled(x, mask)
    _check(mask, window)
    compiled(x, mask)


def test_documents_may_change_after_a_mask_is_made_of_them() -> None:
    documents = torch.arange(TOKENS) // 5
    mask = SparseMask.from_documents(documents, block_size=8)
    documents.zero_()
    _check(mask, lambda b, h, q, k: q // 5 == k // 5)


def test_a_mask_lives_until_backward_if_saved_tensors_are_replaced() -> None:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        out, _ = _attend(_sparse())
    out.sum().backward()


def test_selected_tokens_keep_the_order_of_a_mask() -> None:
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    mask, places = _sparse().in_order(order), (16, 8, 0, 16)
    here = torch.cat([torch.arange(16, 24), torch.arange(16)])
    kept = select(handle_of(mask), places, places)
    assert [x.tolist() for x in mask_of_handle(kept).orders if x is not None] == [order[here].tolist()] * 2
    rows = mask_of_handle(select(handle_of(mask), (16, 8), ()))
    q, k, none = torch.arange(8)[:, None], torch.arange(TOKENS), torch.tensor(0)
    assert torch.equal(rows.visible(none, none, q, k), frames(none, none, order[16:][:, None], k))
    assert rows.orders[1] is not None
    assert torch.equal(rows.orders[1], order)


def test_blocks_larger_than_the_sequence_cost_no_memory() -> None:
    for mask in (
        SparseMask.from_mask_mod(frames, TOKENS, block_size=1 << 20),
        SparseMask.from_block_mask(
            BlockMask.from_kv_blocks(
                torch.ones(1, 1, 1).int(),
                torch.zeros(1, 1, 1, 1).int(),
                BLOCK_SIZE=1 << 20,
                mask_mod=frames,
                seq_lengths=(TOKENS, TOKENS),
            )
        ),
    ):
        assert mask.block_size == (TOKENS, TOKENS)
        _check(mask, frames)
    assert SparseMask.from_documents(torch.arange(TOKENS), block_size=1 << 20).block_size == (TOKENS, TOKENS)


@pytest.mark.parametrize("shape", [(0,), (1, 0), (2, 0), (0, 5)])
def test_documents_may_have_no_tokens(shape: tuple[int, ...]) -> None:
    mask = SparseMask.from_documents(torch.zeros(shape, dtype=torch.int64), block_size=4)
    assert mask.lengths == (shape[-1], shape[-1])
    assert mask.area == 0


@pytest.mark.parametrize("size", [0, -1, 1.5, (8,), (8, 0)])
def test_a_block_size_that_is_not_positive_raises(size: Any) -> None:
    with pytest.raises(ShapeError, match=r"block_size=.*must be a positive int"):
        SparseMask.from_mask_mod(frames, TOKENS, block_size=size)


def test_masks_do_not_depend_on_the_default_device() -> None:
    documents, order = torch.arange(TOKENS) // 5, torch.randperm(TOKENS)
    with torch.device("meta"):
        mask = SparseMask.from_documents(documents, block_size=8)
        assert mask.checksum
        assert mask.in_order(order).checksum
        assert balanced_order(_sparse(frames), 2) is not None
        rows = mask_of_handle(select(handle_of(mask), (8, 4, 20, 4), ()))
        assert rows.lengths == (8, TOKENS)
    _check(mask, lambda b, h, q, k: q // 5 == k // 5)
