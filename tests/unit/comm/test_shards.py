"""How tokens, rows and heads are divided over ranks."""

from __future__ import annotations

import itertools

import pytest

from lightning_cp.comm.shards import shard_range, shard_sizes

SHARES = ((2, 1), (1, 2, 1), (100, 1, 1), (1, 100, 7, 3), (3, 1, 1, 2), (333333, 142857, 1000000), (5, 4, 3, 2, 1, 1))


def test_equal_shares_give_the_first_ranks_one_more() -> None:
    assert shard_sizes(8, 3) == (3, 3, 2)
    assert shard_sizes(1, 3) == (1, 0, 0)


@pytest.mark.parametrize("shares", SHARES)
def test_sizes_follow_the_shares_and_no_rank_stays_empty(shares: tuple[int, ...]) -> None:
    ranks, total = len(shares), sum(shares)
    for length in (*range(40), 1000, 123457):
        sizes = shard_sizes(length, ranks, shares)
        assert sum(sizes) == length
        assert min(sizes) >= (length >= ranks)
        ideal = [length * share / total for share in shares]
        if min(ideal) >= 1:
            assert all(abs(size - x) <= 1 for size, x in zip(sizes, ideal, strict=True))
        ranges = [shard_range(length, ranks, rank, shares) for rank in range(ranks)]
        assert list(itertools.chain(*ranges)) == list(range(length))


def test_few_heads_are_divided_as_well_as_they_can_be() -> None:
    assert shard_sizes(4, 2, (3, 1)) == (3, 1)
    assert shard_sizes(3, 2, (1, 2)) == (1, 2)
    assert shard_sizes(8, 2, (2, 1)) == (5, 3)
    assert shard_sizes(12, 3, (2, 1, 1)) == (6, 3, 3)
    assert shard_sizes(3, 3, (9, 1, 1)) == (1, 1, 1)
