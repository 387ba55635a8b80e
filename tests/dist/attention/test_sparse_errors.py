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


def _different(rank: int, world: int, ulysses: bool) -> dict[str, list[str]]:
    tokens, odd = LENGTH * world, rank == world - 1
    same = _attend(world, _window(tokens, 2), ulysses, True)  # another object with the mask of most ranks
    masks: dict[str, Any] = {
        "table": _window(tokens, 9 if odd else 2),
        "function": _window(tokens, 3 if odd else 2, block=tokens),
        "order": _window(tokens, 2).in_order(torch.arange(tokens).roll(int(odd))),
        "block": _window(tokens, 2, block=3 if odd else 4),
    }
    errors = {kind: [_attend(world, mask, ulysses, known) for known in (True, False)] for kind, mask in masks.items()}
    return {
        "right": [same, _attend(world, _window(tokens, 4), ulysses, True)],
        **errors,
    }  # ranks are in step after them


@pytest.mark.parametrize("ulysses", [False, True])
def test_different_masks_raise_on_all_ranks(run_ranks: RankPool, ulysses: bool) -> None:
    for errors in run_ranks(3, _different, ulysses):
        assert errors.pop("right") == ["", ""]
        assert len(errors) == 4
        for kind, (known, exchanged) in errors.items():
            assert known.startswith("PeerMismatchError: block_mask differs between the ranks of a context group"), kind
            assert exchanged == known


def _one_rank_without(rank: int, world: int, known: bool, ulysses: bool) -> list[str]:
    """Attend with a mask on all ranks but the last: at first, then with masks that were used before."""
    mask, other, is_last = _window(LENGTH * world, 3), _window(LENGTH * world, 2), rank == world - 1
    return [
        _attend(world, None if is_last else mask, ulysses, known),
        _attend(world, "a mask" if is_last else mask, ulysses, known),
        _attend(world, mask, ulysses, known),
        _attend(world, None, ulysses, known),
        _attend(world, None if is_last else mask, ulysses, known),
        _attend(world, other, ulysses, known),
        _attend(world, other if is_last else mask, ulysses, known),
        _attend(world, _window(LENGTH * world, 4) if is_last else mask, ulysses, known),
        _attend(world, _window(LENGTH * world, 3) if is_last else mask, ulysses, known),  # equal: no error
    ]


@pytest.mark.parametrize(("known", "ulysses"), [(False, False), (True, True)])
def test_a_mask_on_some_ranks_raises_on_all(run_ranks: RankPool, known: bool, ulysses: bool) -> None:
    world = 3
    for rank, errors in enumerate(run_ranks(world, _one_rank_without, known, ulysses)):
        missing, other, *right = (errors[i] for i in (0, 1, 2, 3, 5, 8))
        assert right == [""] * 4
        for error in (missing, errors[4], *errors[6:8]):
            assert error.startswith("PeerMismatchError: block_mask differs between the ranks of a context group"), error
        if rank == world - 1:
            assert other.startswith("TypeError: block_mask is a str: it must be a BlockMask")
        else:
            assert other.startswith(f"PeerMismatchError: rank(s) [{world - 1}] of the context group got invalid")


def _different_calls(rank: int, world: int) -> list[str]:
    """Attend with lengths that no other test has, and a setting or a mask that one rank has alone."""
    errors, odd = [], rank == world - 1
    for extra, given in enumerate(({"is_causal": odd}, {"scale": 1.0 + odd}, {"attn_mask": odd}, {"q_lengths": odd})):
        x = torch.randn(1, 20 + extra, 4, 8)
        lengths = [20 + extra] * world
        more: dict[str, Any] = {"q_lengths": lengths, "kv_lengths": lengths, **given}
        if "attn_mask" in given:
            more["attn_mask"] = torch.ones(1, 20 + extra, dtype=torch.bool) if odd else None
        if "q_lengths" in given:
            more["q_lengths"] = None if odd else lengths
        try:
            context_parallel_attention(x, x, x, parallel_config=ContextParallelConfig(ring_degree=world), **more)
            errors.append("")
        except PeerMismatchError as error:
            errors.append(str(error))
    return errors


def test_the_first_calls_of_a_kind_are_compared_with_known_lengths(run_ranks: RankPool) -> None:
    for errors in run_ranks(3, _different_calls):
        assert all("called attention differently" in error for error in errors), errors


def _wrong_length(rank: int, world: int, known: bool) -> list[str]:
    """Attend with a mask of this rank's tokens only, and with one token too many."""
    errors = [_attend(world, _window(tokens, 2), False, known) for tokens in (LENGTH, LENGTH * world + 1)]
    return [*errors, _attend(world, _window(LENGTH * world, 4), False, known)]


@pytest.mark.parametrize("known", [True, False])
def test_a_mask_of_another_length_raises_on_all_ranks(run_ranks: RankPool, known: bool) -> None:
    for local, longer, later in run_ranks(3, _wrong_length, known):
        assert "6 queries and 6 keys, but attention has batch 1, 4 heads, 18 q" in local
        assert "19 queries and 19 keys, but attention has batch 1" in longer
        assert "make it for the whole sequence" in local
        assert later == ""
