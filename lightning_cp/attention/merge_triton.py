"""The merge of partial attentions as one Triton kernel, in place: one pass over memory instead of five."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lightning_cp.kernels import Part

_ROWS = 16  # of a program


def merge_in_place(a: Part, b: Part) -> Part:
    """As `merge.merge`; `a.out` and `a.lse`, float32 both, hold the result."""
    batch, tokens, heads, size = a.out.shape
    rows = batch * tokens * heads
    if rows:
        with torch.cuda.device(a.out.device):
            _merge[(triton.cdiv(rows, _ROWS),)](
                *(a.out, a.lse, b.out, b.lse, rows, tokens, heads, size),
                *(*a.out.stride(), *a.lse.stride(), *b.out.stride(), *b.lse.stride()),
                rows_of_program=_ROWS,
                padded_size=triton.next_power_of_2(size),
            )
    return a


@triton.jit  # type: ignore[untyped-decorator]
def _merge(
    a_out: Any,
    a_lse: Any,
    b_out: Any,
    b_lse: Any,
    rows: Any,
    tokens: Any,
    heads: Any,
    size: Any,
    a_out_b: Any,
    a_out_s: Any,
    a_out_h: Any,
    a_out_d: Any,
    a_lse_b: Any,
    a_lse_s: Any,
    a_lse_h: Any,
    b_out_b: Any,
    b_out_s: Any,
    b_out_h: Any,
    b_out_d: Any,
    b_lse_b: Any,
    b_lse_s: Any,
    b_lse_h: Any,
    rows_of_program: tl.constexpr,
    padded_size: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * rows_of_program + tl.arange(0, rows_of_program)
    there = row < rows
    head, token, sample = row % heads, (row // heads) % tokens, row // (heads * tokens)
    at_a_lse = a_lse + sample * a_lse_b + token * a_lse_s + head * a_lse_h
    lse_a = tl.load(at_a_lse, mask=there, other=0.0)
    lse_b = tl.load(b_lse + sample * b_lse_b + token * b_lse_s + head * b_lse_h, mask=there, other=0.0)
    most = tl.maximum(lse_a, lse_b)
    none = most == float("-inf")  # neither has a key: both are 0
    safe = tl.where(none, 0.0, most)
    weight_a, weight_b = tl.exp(lse_a - safe), tl.exp(lse_b - safe)
    total = tl.where(none, 1.0, weight_a + weight_b)
    share = (weight_b / total)[:, None]
    dim = tl.arange(0, padded_size)[None, :]
    inside = there[:, None] & (dim < size)
    at_a = a_out + (sample * a_out_b + token * a_out_s + head * a_out_h)[:, None] + dim * a_out_d
    at_b = b_out + (sample * b_out_b + token * b_out_s + head * b_out_h)[:, None] + dim * b_out_d
    x, y = tl.load(at_a, mask=inside, other=0.0), tl.load(at_b, mask=inside, other=0.0).to(tl.float32)
    tl.store(at_a, x + share * (y - x), mask=inside)
    tl.store(at_a_lse, tl.where(none, most, safe + tl.log(total)), mask=there)
