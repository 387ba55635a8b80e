"""Flex attention's operators as sparse masks use them, without a GPU: traced as for the compiler, run in eager mode."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cp.attention.merge import merge
from lightning_cp.attention.sparse import SparseMask, flex
from lightning_cp.attention.sparse.tiles import Tiles, tiles_of
from lightning_cp.kernels import PartialAttention, PartialAttentionGrad


@pytest.fixture
def _eager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let PyTorch trace the operators as it does for a GPU, and run their eager form."""
    torch.compiler.reset()
    compiled = functools.cache(lambda name: torch.compile(flex._FUNCTIONS[name], fullgraph=True, backend="aot_eager"))
    monkeypatch.setattr(flex, "_compiled", compiled)
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("kind", ["documents", "heads", "few queries"])
@pytest.mark.usefixtures("_eager")
@pytest.mark.default(1)
def test_two_sets_of_keys_equal_one_attention(kind: str) -> None:
    torch.manual_seed(0)
    batch, tokens, heads, size, first = 2, 300, 2, 8, 170
    q, k, v, g = (torch.randn(batch, tokens, heads, size, dtype=torch.float64) for _ in range(4))
    mask = _mask(kind, tokens, batch, heads)
    positions = torch.arange(tokens)
    sets: list[tuple[Tensor, Tensor, Tiles]] = []
    for keys in (positions[:first], positions[first:]):
        tiles = tiles_of(mask, positions, keys, heads=slice(0, mask.kinds.shape[1]), device=torch.device("cpu"))
        sets.append((k[:, keys], v[:, keys], tiles))
    parts = [flex.attend_flex(q, *keys, scale=0.3) for keys in sets]
    part = merge(PartialAttention(*(x.double() for x in parts[0])), PartialAttention(*(x.double() for x in parts[1])))
    g_lse = torch.randn_like(part.lse)
    known = PartialAttention(part.out, part.lse)
    grads = [
        flex.attend_flex_backward(PartialAttentionGrad(g, g_lse), q, x, y, known, t, scale=0.3) for x, y, t in sets
    ]
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None]
    visible = mask.visible(b, h, positions[:, None], positions)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", leaves[0], leaves[1]) * 0.3
    lse = scores.masked_fill(~visible, float("-inf")).logsumexp(-1)
    finite = lse.masked_fill(lse == float("-inf"), 0)
    weights = torch.exp(scores.masked_fill(~visible, float("-inf")) - finite.unsqueeze(-1))
    out = torch.einsum("bhqk,bkhd->bqhd", weights, leaves[2])
    expected = torch.autograd.grad((out, finite.transpose(1, 2)), leaves, (g, g_lse))
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)  # LSE is float32 there
    close(part.out, out.detach())
    close(part.lse.float(), lse.transpose(1, 2).detach().float())
    close(grads[0].query + grads[1].query, expected[0])
    close(torch.cat([x.key for x in grads], 1), expected[1])
    close(torch.cat([x.value for x in grads], 1), expected[2])


def _mask(kind: str, tokens: int, batch: int, heads: int) -> SparseMask:
    if kind == "documents":
        return SparseMask.from_documents(torch.arange(tokens) // 90)
    if kind == "heads":
        return SparseMask.from_mask_mod(
            lambda b, h, q, k: (q - k).abs() < 20 * (h + 1) + 9 * b, tokens, batch=batch, heads=heads
        )
    return SparseMask.from_mask_mod(lambda b, h, q, k: (q > 150) & (k > 200), tokens)
