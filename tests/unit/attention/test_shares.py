"""Distribution of heads over a Ulysses group."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from lightning_cp.attention.heads import assign_heads, head_shares
from lightning_cp.mesh.groups import SINGLE_RANK

HEADS = [(8, 8), (8, 2), (8, 1), (7, 7), (9, 3), (12, 4), (24, 8), (15, 5), (10, 2)]


@pytest.mark.parametrize("by_share", [False, True])
def test_every_query_head_goes_to_one_rank_with_its_key_head(by_share: bool) -> None:
    for (hq, hk), degree in product(HEADS, (1, 2, 3, 4, 5, 7)):
        _check_heads(hq, hk, degree, by_share)


def _check_heads(hq: int, hk: int, degree: int, by_share: bool) -> None:
    shares = assign_heads(hq, hk, degree, tuple(range(1, degree + 1)) if by_share else None)
    assert [head for share in shares for head in range(share.query.start, share.query.stop)] == list(range(hq))
    sizes = [share.num_queries for share in shares]
    assert min(sizes) >= 1
    assert by_share or max(sizes) - min(sizes) <= 1
    for share in shares:
        local = list(range(share.query.start, share.query.stop))
        keys = list(range(share.key.start, share.key.stop))
        used = [head // (hq // hk) for head in local]
        assert sorted(set(used)) == keys  # all that is needed, and no more
        assert used == [keys[i] for i in share.key_of_each(torch.device("cpu"))]
        if not share.ragged:
            assert len(local) % len(keys) == 0
            assert used == [keys[i // (len(local) // len(keys))] for i in range(len(local))]


def test_heads_that_do_not_group_evenly_are_ragged() -> None:
    assert [share.ragged for share in assign_heads(9, 3, 2)] == [True, True]
    assert [share.ragged for share in assign_heads(8, 2, 3)] == [False, True, False]
    assert [share.ragged for share in assign_heads(8, 8, 3)] == [False, False, False]


def test_heads_are_divided_by_the_shares_of_each_ulysses_coordinate() -> None:
    groups = replace(SINGLE_RANK, context_shape=(3, 2), shares=(1, 2, 3, 1, 1, 2))
    assert head_shares(groups) == (1 + 3 + 1, 2 + 1 + 2)
    assert head_shares(replace(groups, context_shape=(2, 3))) == (1 + 1, 2 + 1, 3 + 2)
    assert head_shares(replace(groups, shares=None)) is None
    assert [share.num_queries for share in assign_heads(8, 8, 3, (2, 3, 5))] == [2, 2, 4]
