"""In-place merge of partial attentions in one Triton kernel: one pass over memory instead of five."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_cp.kernels import PartialAttention

_ELEMENTS_PER_PROGRAM = 2048  # 16 per thread


def merge_in_place(a: PartialAttention, b: PartialAttention) -> PartialAttention:
    """Merge `b` into `a` on the GPU.

    Each element of `out` moves 8 bytes for `a` (read, write) and 2 or 4 for `b`; each row moves 12 bytes of lse.

    Args:
        a: out [b, s, h, d] and lse [b, s, h], both float32 on one CUDA device, with any strides; both are overwritten.
        b: same shapes as `a`; out in float32, bfloat16 or float16, lse in float32.
    Returns: `a`, overwritten with the result of `merge.merge`.
    """
    batch, tokens, heads, head_dim = a.out.shape
    block = block_shape(head_dim)
    if batch * tokens * heads:
        with torch.cuda.device(a.out.device):
            _merge[(triton.cdiv(tokens, block["tokens_per_program"]), heads, batch)](
                a.out,
                a.lse,
                b.out,
                b.lse,
                tokens,
                head_dim,
                *a.out.stride(),
                *a.lse.stride(),
                *b.out.stride(),
                *b.lse.stride(),
                **block,
            )
    return a


def block_shape(head_dim: int) -> dict[str, int]:
    """Return the compile-time sizes of the kernel for a head dim: the block that one program merges."""
    padded = triton.next_power_of_2(head_dim)
    return {"tokens_per_program": max(1, _ELEMENTS_PER_PROGRAM // padded), "padded_head_dim": padded}


# Only constexpr parameters are annotated: Triton evaluates annotations, and any other name fails to compile.
@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    a_out,
    a_lse,
    b_out,
    b_lse,
    tokens,
    head_dim,
    a_out_b,
    a_out_s,
    a_out_h,
    a_out_d,
    a_lse_b,
    a_lse_s,
    a_lse_h,
    b_out_b,
    b_out_s,
    b_out_h,
    b_out_d,
    b_lse_b,
    b_lse_s,
    b_lse_h,
    tokens_per_program: tl.constexpr,
    padded_head_dim: tl.constexpr,
):
    # 64-bit offsets: 128k tokens x 64 heads x 256 elements exceed 2^31.
    head, sample = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * tokens_per_program + tl.arange(0, tokens_per_program)
    valid = token < tokens
    a_lse_at = a_lse + sample * a_lse_b + head * a_lse_h + token * a_lse_s
    lse_a = tl.load(a_lse_at, mask=valid, other=0.0)
    lse_b = tl.load(b_lse + sample * b_lse_b + head * b_lse_h + token * b_lse_s, mask=valid, other=0.0)
    highest = tl.maximum(lse_a, lse_b)
    no_keys = highest == float("-inf")  # no keys in a and b: out stays 0, lse stays -inf
    shift = tl.where(no_keys, 0.0, highest)
    weight_a, weight_b = tl.exp(lse_a - shift), tl.exp(lse_b - shift)
    total = tl.where(no_keys, 1.0, weight_a + weight_b)
    share_b = (weight_b / total)[:, None]
    dim = tl.arange(0, padded_head_dim)[None, :]
    inside = valid[:, None] & (dim < head_dim)
    a_at = a_out + sample * a_out_b + head * a_out_h + (token * a_out_s)[:, None] + dim * a_out_d
    b_at = b_out + sample * b_out_b + head * b_out_h + (token * b_out_s)[:, None] + dim * b_out_d
    x, y = tl.load(a_at, mask=inside, other=0.0), tl.load(b_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(a_at, x + share_b * (y - x), mask=inside)
    tl.store(a_lse_at, tl.where(no_keys, highest, shift + tl.log(total)), mask=valid)
