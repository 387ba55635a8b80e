"""The merge of partial attention over disjoint keys."""

from __future__ import annotations

import pytest
import torch

from lightning_cp.attention.merge import accumulator, merge
from lightning_cp.errors import ShapeError
from lightning_cp.kernels import PartialAttention
from tests.reference import max_error, softmax_attention


def test_parts_over_some_keys_merge_into_attention_over_all() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, s, 3, 8, dtype=torch.float64) for s in (5, 9, 9))
    mask = torch.rand(2, 1, 5, 9) > 0.5
    mask[:, :, 0, :4] = False  # a row with nothing in the first part
    mask[:, :, 1, 4:] = False  # one with nothing in the others
    mask[:, :, 2] = False  # one with nothing at all
    chunks = [slice(0, 4), slice(4, 5), slice(5, 9)]
    parts = [PartialAttention(*softmax_attention(q, k[:, c], v[:, c], mask[..., c])) for c in chunks]
    out, lse = softmax_attention(q, k, v, mask)
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        total = accumulator(PartialAttention(parts[order[0]].out.clone(), parts[order[0]].lse), torch.float64)
        for index in order[1:]:
            total = merge(total, parts[index])
        assert max_error(total.out, out) < 1e-14
        assert max_error(total.lse, lse) < 1e-14


def test_parts_without_any_key_stay_zero_and_minus_infinity() -> None:
    nothing = PartialAttention(torch.zeros(1, 2, 1, 4), torch.full((1, 2, 1), -torch.inf))
    total = merge(accumulator(PartialAttention(nothing.out.clone(), nothing.lse), torch.float32), nothing)
    assert not total.out.any()
    assert bool((total.lse == -torch.inf).all())


def test_extreme_weights_do_not_overflow() -> None:
    a = PartialAttention(torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), 3e4))
    b = PartialAttention(torch.full((1, 1, 1, 2), 2.0), torch.full((1, 1, 1), -3e4))
    assert merge(PartialAttention(a.out.clone(), a.lse), b).out.tolist() == a.out.tolist()
    assert merge(PartialAttention(b.out.clone(), b.lse), a).out.tolist() == a.out.tolist()
    assert merge(PartialAttention(a.out.clone(), a.lse), b).lse.item() == 3e4


def test_a_merge_keeps_the_accumulators_dtype_and_lse_in_float32() -> None:
    part = PartialAttention(torch.ones(1, 2, 1, 4, dtype=torch.bfloat16), torch.zeros(1, 2, 1))
    wide = merge(accumulator(part, torch.float32), part)
    assert (wide.out.dtype, wide.lse.dtype) == (torch.float32, torch.float32)
    narrow = merge(accumulator(PartialAttention(part.out.clone(), part.lse), torch.bfloat16), part)
    assert (narrow.out.dtype, narrow.lse.dtype) == (torch.bfloat16, torch.float32)


def test_parts_of_different_shapes_are_refused() -> None:
    a = PartialAttention(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1))
    b = PartialAttention(torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1))
    with pytest.raises(ShapeError, match=r"\(1, 2, 1, 4\) and \(1, 3, 1, 4\)"):
        merge(a, b)
