"""Masks that compiled code and CUDA graphs compute from two drawn numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_cp.engine.attention.dropout import _drop_in_graph


def _mask(rank: int, p: float, seed: int, count: int = 1 << 18) -> Tensor:
    torch.manual_seed(seed)
    return _drop_in_graph(torch.ones(count // 64, 64), p, rank=rank, inplace=False) != 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks_drop_a_share_p_and_are_independent(p: float) -> None:
    """Within five standard deviations: the share that is kept, by row and by column; agreement between ranks."""
    masks = [_mask(rank, p, seed).double() - (1 - p) for rank in range(3) for seed in range(2)]
    count, deviation = masks[0].numel(), math.sqrt(p * (1 - p))
    for i, mask in enumerate(masks):
        assert abs(mask.mean()) < 5 * deviation / math.sqrt(count)
        assert mask.mean(0).abs().max() < 5 * deviation / math.sqrt(mask.shape[0])
        for shift in (1, 2, 64, 4096):
            moved = mask.flatten().roll(shift)
            assert abs((mask.flatten() * moved).mean()) < 5 * deviation**2 / math.sqrt(count)
        for other in masks[i + 1 :]:
            assert abs((mask * other).mean()) < 5 * deviation**2 / math.sqrt(count)


def test_masks_are_drawn_again_from_the_same_state() -> None:
    assert torch.equal(_mask(1, 0.3, seed=5), _mask(1, 0.3, seed=5))
    assert not torch.equal(_mask(1, 0.3, seed=5), _mask(1, 0.3, seed=6))


def test_ranks_draw_equally_many_numbers_whatever_their_shards_hold() -> None:
    states = []
    for rank, tokens in ((0, 7), (1, 3), (2, 0)):
        torch.manual_seed(0)
        _drop_in_graph(torch.ones(tokens, 4), 0.5, rank=rank, inplace=False)
        states.append(torch.get_rng_state())
    assert all(torch.equal(states[0], state) for state in states[1:])


@pytest.mark.parametrize("p", [0.25, 1.0])
@pytest.mark.parametrize("inplace", [False, True])
def test_values_and_gradients_are_scaled_as_by_dropout(p: float, inplace: bool) -> None:
    leaf = torch.randn(64, 8, dtype=torch.float64, requires_grad=True)
    x = leaf * 1
    out = _drop_in_graph(x, p, rank=1, inplace=inplace)
    assert (out is x) == inplace
    kept = out != 0
    expected = torch.where(kept, leaf / (1 - p if p < 1 else 1), torch.zeros_like(leaf))
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, kept.double() / (1 - p if p < 1 else 1))
