"""Wrong sparse masks raise on every rank, and nothing hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_cp import ContextParallelConfig, SparseMask, context_parallel_attention
from lightning_cp.errors import PeerMismatchError, ShapeError
from tests.harness import RankPool

LENGTH = 6


def _attend(world: int, mask: Any, ulysses: bool, known: bool) -> str:
    """Attend with this rank's mask. Returns: the error; "" if there is none."""
    x = torch.randn(1, LENGTH, 4, 8)
    lengths = [LENGTH] * world if known else None
    degrees = {"ulysses_degree": world} if ulysses else {"ring_degree": world}
    config = ContextParallelConfig(**degrees)
    try:
        context_parallel_attention(
            x, x, x, parallel_config=config, q_lengths=lengths, kv_lengths=lengths, block_mask=mask
        )
    except (PeerMismatchError, ShapeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _window(tokens: int, width: int, block: int = 4) -> SparseMask:
    return SparseMask.from_mask_mod(lambda b, h, q, k: (q - k).abs() < width, tokens, block_size=block)


def _different(rank: int, world: int, kind: str, ulysses: bool) -> list[str]:
    tokens, odd = LENGTH * world, rank == world - 1
    assert _attend(world, _window(tokens, 2), ulysses, True) == ""  # another object with the mask of most ranks
    masks: dict[str, Any] = {
        "table": _window(tokens, 9 if odd else 2),
        "function": _window(tokens, 3 if odd else 2, block=tokens),
        "order": _window(tokens, 2).in_order(torch.arange(tokens).roll(int(odd))),
        "block": _window(tokens, 2, block=3 if odd else 4),
    }
    errors = [_attend(world, masks[kind], ulysses, known) for known in (True, False)]
    return [*errors, _attend(world, _window(tokens, 4), ulysses, True)]  # ranks are in step after the errors


@pytest.mark.parametrize(
    ("world", "kind", "ulysses"),
    [
        (3, "table", False),
        *(
            pytest.param(world, kind, ulysses, marks=pytest.mark.full)
            for world in (2, 3)
            for kind in ("table", "function", "order", "block")
            for ulysses in (False, True)
            if (world, kind, ulysses) != (3, "table", False)
        ),
    ],
)
def test_different_masks_raise_on_all_ranks(run_ranks: RankPool, world: int, kind: str, ulysses: bool) -> None:
    for known, exchanged, later in run_ranks(world, _different, kind, ulysses):
        assert known.startswith("PeerMismatchError: block_mask differs between the ranks of a context group"), known
        assert exchanged.startswith("PeerMismatchError: ranks of one context group called attention differently")
        assert "checksum of block_mask" in exchanged
        assert later == ""


def _one_rank_without(rank: int, world: int) -> list[str]:
    """Attend with a mask on all ranks but the last, and with an argument that is no mask on the last."""
    mask = _window(LENGTH * world, 3)
    missing = _attend(world, None if rank == world - 1 else mask, ulysses=False, known=False)
    other = _attend(world, "a mask" if rank == world - 1 else mask, ulysses=False, known=False)
    return [missing, other, _attend(world, mask, ulysses=False, known=False)]


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 3])
def test_a_mask_on_some_ranks_raises_on_all(run_ranks: RankPool, world: int) -> None:
    for rank, (missing, other, later) in enumerate(run_ranks(world, _one_rank_without)):
        assert missing.startswith("PeerMismatchError: ranks of one context group called attention differently")
        if rank == world - 1:
            assert other.startswith("TypeError: block_mask is a str: it must be a BlockMask")
        else:
            assert other.startswith(f"PeerMismatchError: rank(s) [{world - 1}] of the context group got invalid")
        assert later == ""


def _wrong_length(rank: int, world: int, known: bool) -> list[str]:
    """Attend with a mask of this rank's tokens only, and with one token too many."""
    errors = [_attend(world, _window(tokens, 2), False, known) for tokens in (LENGTH, LENGTH * world + 1)]
    return [*errors, _attend(world, _window(LENGTH * world, 4), False, known)]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 3])
def test_a_mask_of_another_length_raises_on_all_ranks(run_ranks: RankPool, world: int, known: bool) -> None:
    for local, longer, later in run_ranks(world, _wrong_length, known):
        assert f"{LENGTH} queries and {LENGTH} keys, but attention has batch 1, 4 heads, {LENGTH * world} q" in local
        assert f"{LENGTH * world + 1} queries and {LENGTH * world + 1} keys, but attention has batch 1" in longer
        assert "make it for the whole sequence" in local
        assert later == ""
