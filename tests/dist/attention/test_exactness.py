"""Attention over several ranks equals plain softmax attention, and so do its gradients, in every mode and shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product

import pytest

from tests.dist.problems import MASKS, Problem, check_exact
from tests.harness import RankPool

ROTATED = [  # world, ring, ulysses, rotate method; by default those of 3 ranks on an axis
    (3, 3, 1, "allgather"),
    (3, 3, 1, "alltoall"),
    (3, 1, 3, "allgather"),
    (6, 3, 2, "alltoall"),
    (6, 6, 1, "grid 3x2"),
    (2, 2, 1, "alltoall"),  # the next rank is the previous one, too
    (4, 4, 1, "allgather"),
    (4, 1, 4, "allgather"),
    (6, 2, 3, "allgather"),
    (6, 6, 1, "grid 2x3"),
    (4, 2, 2, "grid 1x2"),
    (8, 4, 2, "grid 2x2"),
]
BY_DEFAULT = 5
WORLDS = [(3, 3, 1), (3, 1, 3), (6, 3, 2)]


# Query and key heads: many, not divisible by any degree, grouped evenly, one key head, ragged groups.
HEADS = ((6, 6), (7, 7), (12, 6), (6, 1), (9, 3), (8, 2), (10, 5))


def lengths(kind: str, world: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Local lengths of queries and keys, by rank."""
    even, uneven = (3,) * world, tuple(1 + (i * 3 + 2) % 5 for i in range(world))
    if kind == "even":
        return even, even
    if kind == "uneven":
        return uneven, uneven
    if kind == "first empty":
        return (0, *uneven[1:]), (0, *uneven[1:])
    if kind == "most empty":
        one = (0,) * (world - 1) + (5,)
        return one, one
    if kind == "cross":
        return tuple(2 + i for i in range(world)), tuple(5 - i % 4 for i in range(world))
    if kind == "cross empty":  # some have queries and no keys, some the other way
        return tuple(3 * (i % 2) for i in range(world)), tuple(4 * (i % 2 == 0) for i in range(world))
    raise AssertionError(kind)


LENGTHS = ("even", "uneven", "first empty", "most empty", "cross", "cross empty")


def problems(ring: int, ulysses: int, rotate: str) -> Iterator[Problem]:
    """Every pair of lengths and mask, causal and not; the other choices take turns, in periods prime to each other."""
    heads = cycle(HEADS)
    known = cycle((True, False))
    layout = cycle(("contiguous", "transposed", "sliced"))
    needs = cycle(("qkv", "qkv", "qkv", "q", "kv", "qkv", "v"))
    through = cycle(("both", "both", "out", "lse", "both"))
    slices = cycle((*(1, 4 << 20, 600) * 4, 1))
    for kind, mask, causal in product(LENGTHS, MASKS, (False, True)):
        hq, hk = next(heads)
        q, kv = lengths(kind, ring * ulysses)
        if causal:  # else it would go in step with `causal`
            next(known)
        yield Problem(
            ring,
            ulysses,
            q,
            kv,
            rotate,
            hq,
            hk,
            mask=mask,
            causal=causal,
            known=next(known),
            layout=next(layout),
            needs=next(needs),
            through=next(through),
            slice_bytes=next(slices),
        )


def _assert_exact(run_ranks: RankPool, world: int, cases: list[Problem], timeout_s: float = 120) -> None:
    wrong = [line for lines in run_ranks(world, check_exact, cases, timeout_s=timeout_s) for line in lines]
    assert not wrong, f"{len(wrong)} wrong of {world} x {len(cases)}:\n" + "\n".join(wrong[:10])


def _share(cases: Iterator[Problem], world: int, place: int) -> list[Problem]:
    """Pick half of the problems at 3 ranks and a quarter at 6: modes at neighbouring places try the others.

    Args:
        cases: in the order of lengths, masks, and causal or not.
    """
    step, of_lengths = {3: 2, 6: 4}[world], 2 * len(MASKS)
    return [x for i, x in enumerate(cases) if (i // of_lengths + i % of_lengths // 4 + place) % step == 0]


@pytest.mark.parametrize("place", range(BY_DEFAULT))
def test_each_mode_is_tried_with_every_mask_and_kind_of_lengths(place: int) -> None:
    world, ring, ulysses, rotate = ROTATED[place]
    tried = _share(problems(ring, ulysses, rotate), world, place)
    assert {(x.mask, x.causal) for x in tried} == set(product(MASKS, (False, True)))
    kinds = {lengths(kind, world) for kind in LENGTHS}
    assert {(x.q_lengths, x.kv_lengths) for x in tried} == kinds
    assert {(x.heads, x.kv_heads) for x in tried} == set(HEADS)
    assert {x.known for x in tried} == {True, False}
    assert len({x.layout for x in tried}) == len({x.through for x in tried}) == 3


@pytest.mark.parametrize(("world", "ring", "ulysses", "rotate"), ROTATED[:BY_DEFAULT])
def test_results_and_gradients_are_exact_for_all_lengths_and_masks(
    run_ranks: RankPool, world: int, ring: int, ulysses: int, rotate: str
) -> None:
    place = ROTATED.index((world, ring, ulysses, rotate))
    _assert_exact(run_ranks, world, _share(problems(ring, ulysses, rotate), world, place))


@pytest.mark.full
@pytest.mark.parametrize(("world", "ring", "ulysses", "rotate"), ROTATED)
def test_all_problems_are_exact(run_ranks: RankPool, world: int, ring: int, ulysses: int, rotate: str) -> None:
    cases = [*problems(ring, ulysses, rotate), *_corners(ring, ulysses)]
    _assert_exact(run_ranks, world, cases, timeout_s=240)


@pytest.mark.parametrize(("world", "ring", "ulysses"), WORLDS)
@pytest.mark.default(2)
def test_grouped_and_undivided_heads_are_exact(run_ranks: RankPool, world: int, ring: int, ulysses: int) -> None:
    uneven = lengths("uneven", world)
    _assert_exact(
        run_ranks,
        world,
        [
            Problem(ring, ulysses, *uneven, heads=hq, kv_heads=hk, mask=mask, causal=causal, known=known)
            for hq, hk in (*HEADS, (max(ulysses, 2), 1), (ulysses, ulysses), (15, 5), (14, 2))
            for mask, causal, known in (("keys heads", False, True), ("rows added", True, True), ("none", True, False))
        ],
    )


@pytest.mark.parametrize(("world", "ring", "ulysses"), WORLDS)
@pytest.mark.default(1)
def test_non_contiguous_inputs_and_any_that_need_gradients_are_exact(
    run_ranks: RankPool, world: int, ring: int, ulysses: int
) -> None:
    cross = lengths("cross", world)
    base = Problem(ring, ulysses, *cross, heads=6, kv_heads=3)
    cases = [replace(base, layout=x, mask=m) for x in ("transposed", "sliced", "expanded") for m in ("none", "keys")]
    cases += [replace(base, needs=needs) for needs in ("q", "k", "v", "qk", "kv")]
    cases += [replace(base, through=through, mask="none left") for through in ("out", "lse", "both")]
    cases += [replace(base, scale=0.3), replace(base, d=1), replace(base, d=16), replace(base, batch=1)]
    _assert_exact(run_ranks, world, cases)


def _corners(ring: int, ulysses: int) -> Iterator[Problem]:
    """The kind of a mask cannot be determined on one rank: all keys on one rank, a single query on another."""
    world = ring * ulysses
    one_holds_all = tuple(6 * (i == world - 1) for i in range(world))
    single_query = (1,) + (3,) * (world - 1)
    for q, kv in (
        (one_holds_all, one_holds_all),
        (single_query, single_query),
        (single_query, one_holds_all),
        ((1,) * world, one_holds_all),
        ((1,) * world, (1,) * world),
        ((2,) * world, one_holds_all),
    ):
        for mask in MASKS:
            for known, causal in ((True, False), (False, True)):
                yield Problem(ring, ulysses, q, kv, heads=6, kv_heads=3, mask=mask, known=known, causal=causal)


def test_masks_of_ambiguous_shape_mean_the_same_on_all_ranks(run_ranks: RankPool) -> None:
    _assert_exact(run_ranks, 3, _share(_corners(3, 1), 3, 0))


def test_degree_one_is_exact_and_needs_no_other_rank(run_ranks: RankPool) -> None:
    """In a process group, one rank alone; and without a group."""
    assert run_ranks(3, _alone) == [[], [], []]
    assert run_ranks(1, _alone, init=False) == [[]]


def _alone(rank: int, world: int) -> list[str]:
    """Problems that are not exact, on the last rank only."""
    cases = [
        Problem(1, 1, q, kv, heads=6, kv_heads=hk, mask=mask, causal=causal, known=known, layout=layout)
        for q, kv, layout in (((5,), (5,), "contiguous"), ((4,), (7,), "sliced"), ((0,), (3,), "transposed"))
        for hk, mask, causal in product((6, 2), MASKS, (False, True))
        for known in (True, False)
    ]
    return check_exact(0, 1, cases) if rank == world - 1 else []
