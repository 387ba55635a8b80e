"""Sparse masks on a GPU: flex attention's operators and ordinary kernels, against float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cp import ContextParallelConfig, context_parallel_attention
from lightning_cp.attention.heads import slice_heads
from lightning_cp.attention.keys import Ring
from lightning_cp.attention.merge import accumulator, merge
from lightning_cp.attention.sparse import SparseMask, local
from lightning_cp.attention.sparse.local import LocalMask, attend_tiles, attend_tiles_backward
from lightning_cp.kernels import PartialAttention, PartialAttentionGrad

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda", 0)
LIMITS = {torch.float32: 2e-3, torch.bfloat16: 1.5e-2, torch.float16: 3e-3}  # float32: the kernel multiplies in TF32
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _documents(tokens: int) -> MaskMod:
    ids = (torch.arange(tokens, device=DEVICE) // 300) ** 2 % 7
    return lambda b, h, q, k: ids[q] == ids[k]


MASKS: dict[str, Callable[[int], MaskMod]] = {
    "documents": _documents,
    "frames": lambda tokens: lambda b, h, q, k: q // 200 >= k // 200,
    "window": lambda tokens: lambda b, h, q, k: (q - k).abs() < 150,
    "heads": lambda tokens: lambda b, h, q, k: (q - k).abs() < 100 * (h + 1) + 50 * b,
    "few queries": lambda tokens: lambda b, h, q, k: (q > 600) & (k > 900),
}


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0).unsqueeze(-1))
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse.transpose(1, 2)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.detach()).norm() / expected.detach().norm())


@pytest.mark.parametrize("kernel", ["auto", "efficient"])
@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize("name", list(MASKS))
def test_two_sets_of_keys_are_merged_exactly(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, kernel: str
) -> None:
    monkeypatch.setattr(local, "is_faster_in_runs", lambda *_: False)  # "auto" is flex attention
    torch.manual_seed(0)
    batch, tokens, heads, kv_heads, size, first = 2, 1337, 4, 2, 64, 700
    q, g = (torch.randn(batch, tokens, heads, size, device=DEVICE, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(batch, tokens, kv_heads, size, device=DEVICE, dtype=dtype) for _ in range(2))
    mod, each = MASKS[name](tokens), name == "heads"
    mask = SparseMask.from_mask_mod(mod, tokens, batch=batch if each else 1, heads=heads if each else 1, device=DEVICE)
    ring = Ring(None, 0, (tokens,), "query_mask", False, size**-0.5, kernel, "allgather", True)
    own = LocalMask(mask, (tokens, 0), (first, tokens - first), rank=0, heads=slice(0, heads), device=DEVICE)
    (every_head,) = slice_heads(heads, kv_heads, 1)
    options: Any = {"scale": ring.scale, "kernel": kernel}
    kernel_for = partial(ring.kernel_for, q)
    sets = [
        (k[:, x.start : x.stop], v[:, x.start : x.stop], own.tiles(every_head, x))
        for x in (range(first), range(first, tokens))
    ]
    parts = [attend_tiles(kernel_for, q, *keys, **options) for keys in sets]
    part = merge(accumulator(parts[0], torch.promote_types(dtype, torch.float32)), parts[1])
    g_lse = torch.randn_like(part.lse)
    grad, known = PartialAttentionGrad(g, g_lse), PartialAttention(part.out.to(dtype), part.lse)
    grads = [attend_tiles_backward(kernel_for, grad, q, *keys[:2], known, keys[2], **options) for keys in sets]
    found = (
        part.out,
        part.lse.masked_fill(part.lse == float("-inf"), 0),
        grads[0].query.double() + grads[1].query,
        torch.cat([x.key for x in grads], 1),
        torch.cat([x.value for x in grads], 1),
    )
    ints = [torch.arange(n, device=DEVICE) for n in (batch, heads, tokens, tokens)]
    dense = mod(ints[0][:, None, None, None], ints[1][:, None, None], ints[2][:, None], ints[3])
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = _reference(leaves[0], leaves[1], leaves[2], dense)
    lse = lse.masked_fill(lse == float("-inf"), 0)
    expected = (out, lse, *torch.autograd.grad((out, lse), leaves, (g.double(), g_lse.double())))
    errors = [_error(x, y) for x, y in zip(found, expected, strict=True)]
    assert max(errors) < LIMITS[dtype], errors


def test_one_compiled_kernel_serves_all_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "is_faster_in_runs", lambda *_: False)
    from torch._dynamo.utils import counters

    q = torch.randn(1, 1024, 2, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    graphs = []
    for name in ("documents", "frames", "window"):
        mask = SparseMask.from_mask_mod(MASKS[name](1024), 1024, device=DEVICE)
        out = context_parallel_attention(q, q, q, parallel_config=ContextParallelConfig(), block_mask=mask)
        assert isinstance(out, Tensor)
        torch.autograd.grad(out.sum(), q)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[2] - graphs[0] <= 2, graphs  # one for forward and one for backward, for any number of partial tiles
