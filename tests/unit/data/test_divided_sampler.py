"""Global batches of samples of several sizes are divided over data groups by their work."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import pytest

from lightning_cp.data import BucketBatchSampler
from lightning_cp.data.divided_sampler import BatchDivision, DividedBatchSampler, DrawnSample, Shard, StepDegrees

TOKENS = [*[64] * 9, *[256] * 5, *[1024] * 3, 4096, *[512] * 5]  # 23 samples of 5 sizes


def division(**settings: object) -> BatchDivision:
    return BatchDivision(TOKENS, TOKENS, 1000.0, **settings)  # type: ignore[arg-type]


def sampler(rank: int, size: int, batch_size: int = 7, **settings: object) -> DividedBatchSampler:
    return DividedBatchSampler(division(**settings), batch_size, StepDegrees.fixed(Shard(rank, size)), seed=5)


@pytest.mark.parametrize("size", [1, 4])
def test_each_sample_of_a_batch_is_given_to_one_group_with_its_position(size: int) -> None:
    for batches in islice(zip(*(sampler(rank, size) for rank in range(size)), strict=True), 3):
        drawn = [one for share in batches for one in share if one.scale]
        assert sorted(one.position for one in drawn) == list(range(7))
        assert all(share for share in batches)
        order = [one.item for one in sorted(drawn, key=lambda one: one.position)]
        assert order == [one.item for one in sorted(next_batch(batches), key=lambda one: one.position)]


def next_batch(batches: tuple[list[DrawnSample], ...]) -> list[DrawnSample]:
    """The batch of one process with the same items."""
    items = {(one.item, one.epoch) for share in batches for one in share}
    return next(batch for batch in alone() if {(one.item, one.epoch) for one in batch} == items)


def alone() -> list[list[DrawnSample]]:
    one = sampler(0, 1)
    batches = list(one)
    one.set_epoch(1)
    return [*batches, *one]


def test_no_sample_is_lost_over_epochs_that_batches_do_not_divide() -> None:
    one, counts = sampler(0, 1), Counter[tuple[int, int]]()
    for epoch in range(7):
        one.set_epoch(epoch)
        counts.update((drawn.item, drawn.epoch) for batch in one for drawn in batch)
    assert counts == Counter((item, epoch) for item in range(23) for epoch in range(7))


def test_a_part_has_samples_of_one_size_and_at_most_the_micro_batch_size() -> None:
    for share in sampler(0, 2, part_size=2):
        parts: dict[int, list[int]] = {}
        for drawn in share:
            parts.setdefault(drawn.part, []).append(TOKENS[drawn.item])
        assert all(len(set(sizes)) == 1 and len(sizes) <= 2 for sizes in parts.values())
        work = [sum(n + n * n / 1000 for n in sizes) for sizes in parts.values()]
        assert work == sorted(work, reverse=True)


def test_the_longest_group_has_little_more_than_the_mean_work() -> None:
    batch = [8, 17, 0, 3, 9, 14, 18, 20, 21, 22, 1, 2, 15, 10]
    # one sample of 4,096 tokens is more than half of the work: no division is better than its work alone
    assert division().groups(batch, 2)[0] == [1]
    rest = [sample for sample in batch if sample != 17]
    assert division().imbalance(rest, 3) < 1.05 < division().imbalance(rest, 3, balanced=False)


def test_groups_with_fewer_parts_repeat_their_smallest_sample_without_counting_it() -> None:
    batch = [17, 0, 9, 14, 18]
    divided = division().parts(batch, 2)
    assert [len(parts) for parts in divided] == [4, 4]
    assert [part.is_counted for part in divided[0]] == [True, False, False, False]
    assert all(part.positions == [0] for part in divided[0])
    drawn = next(iter(sampler(1, 2)))
    assert {one.scale for one in drawn} <= {0.0, 2 / 7}


def test_weights_of_tokens_have_the_mean_1() -> None:
    weights = division(reduction="tokens", weights=[1.0] * 22 + [0.5]).loss_weights([0, 17, 22])
    mean = (64 + 4096 + 512) / 3
    assert weights == pytest.approx([64 / mean, 4096 / mean, 0.5 * 512 / mean])
    assert division().loss_weights([0, 17]) == [1.0, 1.0]


def test_the_longest_sample_of_a_batch_chooses_its_degree() -> None:
    degrees = StepDegrees({1: Shard(2, 4), 2: Shard(1, 2), 4: Shard(0, 1)}, {300: 1, 1024: 2})
    assert [degrees.degree_of(n) for n in (64, 300, 301, 1024, 1025)] == [1, 1, 2, 2, 4]
    one = DividedBatchSampler(division(), 4, degrees, mixed=False, seed=1)
    for share in one:
        (tokens,) = {TOKENS[drawn.item] for drawn in share}
        (degree,) = {drawn.degree for drawn in share}
        assert degree == degrees.degree_of(tokens)
        assert len(share) == 4 * degree // 4
        assert {drawn.scale for drawn in share} == {degrees.shards[degree].size / 4}
    lines = one.report().splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == [f"context degree {n}" for n in (1, 2, 4)]


def test_the_order_continues_at_another_number_of_groups_but_not_as_another_order() -> None:
    one, two = sampler(0, 1), sampler(1, 2)
    batches = list(one)
    two.load_state_dict(one.state_dict(step=2))
    share = next(iter(two))
    assert {x.item for x in share} <= {x.item for x in batches[2]}
    same_sizes = DividedBatchSampler(division(), 7, StepDegrees.fixed(Shard(0, 1)), mixed=False, seed=5)
    with pytest.raises(ValueError, match=r"mixed=False differs from the checkpoint's mixed=True"):
        same_sizes.load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reduction": "mean"}, r"reduction='mean' must be one of 'samples', 'tokens'"),
        ({"part_size": 0}, r"part_size=0 at least 1"),
        ({"weights": [1.0]}, r"must have one value per sample"),
    ],
)
def test_invalid_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        division(**settings)


def test_a_batch_has_a_sample_for_each_group() -> None:
    with pytest.raises(ValueError, match=r"batch_size=3 must be at least the 4 data groups"):
        sampler(0, 4, batch_size=3)
    with pytest.raises(ValueError, match=r"by_tokens=\{64: 3\}: the degree must be one of \[1, 2\]"):
        StepDegrees({1: Shard(0, 2), 2: Shard(0, 1)}, {64: 3})


def test_work_is_quadratic_in_long_samples() -> None:
    np.testing.assert_allclose(division().work[[0, 17]], [64 + 64**2 / 1000, 4096 + 4096**2 / 1000])


def test_a_run_with_batches_of_one_size_can_get_degrees_later_and_a_changed_bucket_is_noticed() -> None:
    plain = BucketBatchSampler(TOKENS, 4, seed=1, with_epoch=True)
    batches = [[item for item, _ in batch] for batch in plain]
    degrees = StepDegrees({1: Shard(0, 2), 2: Shard(0, 1)}, {300: 1})
    divided = DividedBatchSampler(division(), 4, degrees, mixed=False, seed=1)
    divided.load_state_dict(plain.state_dict(step=1))
    assert {one.item for one in next(iter(divided))} <= set(batches[1])
    changed = BatchDivision([1024, *TOKENS[1:]], TOKENS, 1000.0)
    with pytest.raises(ValueError, match="assignment="):
        DividedBatchSampler(changed, 4, degrees, mixed=False, seed=1).load_state_dict(plain.state_dict())


def test_a_sample_with_fewer_tokens_than_ranks_is_refused_on_every_rank() -> None:
    short = BatchDivision([1, 8, 8, 8], [1, 8, 8, 8], 100.0)
    for rank in (0, 1):
        degrees = StepDegrees({1: Shard(rank, 2), 2: Shard(0, 1)}, {4: 1})
        with pytest.raises(ValueError, match="a sample has 1 tokens, which 2 ranks"):
            DividedBatchSampler(short, 2, degrees)
        DividedBatchSampler(short, 2, degrees, mixed=False)  # alone, it is computed on one rank
