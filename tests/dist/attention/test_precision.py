"""Attention in float32, half precision and autocast: as exact as on one device, and in the documented dtypes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from lightning_cp.attention import context_parallel_attention
from tests.dist.problems import Problem, Whole, cut, errors, expect, part_of, solve, squared_errors, whole
from tests.harness import RankPool
from tests.harness.cases import in_turn

MODES = [
    (3, 3, 1, "allgather"),
    (3, 3, 1, "alltoall"),
    (3, 1, 3, "allgather"),
    (4, 2, 2, "alltoall"),
    (4, 4, 1, "grid 2x2"),
]
EVEN_HEADS = {"heads": 4, "kv_heads": 2, "d": 16}


def _long(world: int, ring: int, ulysses: int, rotate: str, **more: object) -> Problem:
    lengths = tuple(24 + 5 * i for i in range(world))
    return Problem(ring, ulysses, lengths, lengths, rotate, **(EVEN_HEADS | more))  # type: ignore[arg-type]


def _relative_errors(rank: int, world: int, problems: list[Problem]) -> list[dict[str, float]]:
    found = []
    for problem in problems:
        given = whole(problem)
        expected = expect(problem, given)
        sizes = {"out": expected.out, "lse": expected.lse.nan_to_num(neginf=0.0)}
        sizes |= {"d" + name: grad for name, grad in expected.grads.items() if grad is not None}
        actual = solve(problem, given, rank)
        assert actual.lse.dtype == torch.float32, problem
        assert actual.out.dtype == problem.dtype, problem
        mine = errors(actual, part_of(expected, problem, rank))
        found.append({name: error / sizes[name].abs().max().item() for name, error in mine.items()})
    return found


@pytest.mark.parametrize(("world", "ring", "ulysses", "rotate"), MODES[::2])
@pytest.mark.default(1)
def test_float32_is_exact_to_1e_5(run_ranks: RankPool, world: int, ring: int, ulysses: int, rotate: str) -> None:
    base = _long(world, ring, ulysses, rotate, dtype=torch.float32)
    masks = ("none", "keys", "keys added", "rank padded", "none left", "rows added", "one row heads")
    problems = [replace(base, mask=mask, causal=causal) for mask in masks for causal in (False, True)]
    problems.append(replace(base, wide=False))
    for rank, found in enumerate(run_ranks(world, _relative_errors, problems)):
        for problem, by_name in zip(problems, found, strict=True):
            assert max(by_name.values()) < 1e-5, f"rank {rank}: {problem}: {by_name}"


def _squared_errors(rank: int, world: int, problems: list[Problem]) -> list[tuple[dict[str, float], dict[str, float]]]:
    """For each problem: of this rank's part, and of one device's answer to the whole in the same dtype."""
    found = []
    for problem in problems:
        given = whole(problem)
        expected = expect(problem, given)
        actual = solve(problem, given, rank)
        assert actual.lse.dtype == torch.float32, problem
        assert actual.out.dtype == problem.dtype, problem
        assert all(grad is not None and grad.dtype == problem.dtype for grad in actual.grads.values()), problem
        single = replace(
            problem,
            ring=1,
            ulysses=1,
            rotate="allgather",
            q_lengths=(sum(problem.q_lengths),),
            kv_lengths=(sum(problem.kv_lengths),),
        )
        alone = solve(single, given, 0)
        lse = errors(actual, part_of(expected, problem, rank))["lse"]
        assert lse < max(2 * errors(alone, expected)["lse"], 1e-4), f"{problem}: lse off by {lse}"
        found.append((squared_errors(actual, part_of(expected, problem, rank)), squared_errors(alone, expected)))
    return found


@pytest.mark.parametrize(("mode", "wide"), in_turn(MODES[::2], (True, False)))
@pytest.mark.default(1)
def test_half_precision_is_nearly_as_good_as_one_device(
    run_ranks: RankPool, mode: tuple[int, int, int, str], wide: bool
) -> None:
    world, factor = mode[0], 1.5 if wide else 2.5
    problems = [
        _long(*mode, dtype=dtype, mask=mask, causal=causal, wide=wide, through="out")
        for dtype in (torch.bfloat16, torch.float16)
        for mask, causal in (("none", False), ("none", True), ("keys", False), ("rows added", False))
    ]
    answers = run_ranks(world, _squared_errors, problems)
    for number, problem in enumerate(problems):
        ours: Counter[str] = Counter()
        for answer in answers:
            ours.update(answer[number][0])
        for name, theirs in answers[0][number][1].items():
            ratio = (ours[name] / theirs) ** 0.5
            assert ratio < factor, f"{problem}: RMS error of {name} is {ratio:.2f} x one device's"


def _through_autocast(rank: int, world: int, problems: list[Problem]) -> list[str]:
    """What differs from attention in the dtype of autocast, or from float64."""
    wrong = []
    for problem in problems:
        given, dtype = whole(problem), problem.dtype
        with torch.autocast("cpu", torch.bfloat16):
            actual = solve(problem, given, rank)
        if dtype == torch.float64:
            expected = solve(problem, given, rank)
        else:
            halves = (x.bfloat16() for x in (given.q, given.k, given.v))
            rounded = Whole(*halves, given.mask, given.grad_out.bfloat16(), given.grad_lse)
            expected = solve(replace(problem, dtype=torch.bfloat16), rounded, rank)
        found = {"out": actual.out, "lse": actual.lse, **actual.grads}
        for name, right in {"out": expected.out, "lse": expected.lse, **expected.grads}.items():
            mine, of_grad = found[name], name in expected.grads
            assert mine is not None
            assert right is not None
            right = right.to(dtype) if of_grad else right
            if mine.dtype != right.dtype or not torch.equal(mine, right):
                wrong.append(f"{name} of {problem}: {mine.dtype} instead of {right.dtype}, or other values")
    return wrong


@pytest.mark.parametrize(("world", "ring", "ulysses", "rotate"), MODES[::2])
@pytest.mark.default(2)
def test_autocast_computes_in_its_dtype_and_leaves_float64(
    run_ranks: RankPool, world: int, ring: int, ulysses: int, rotate: str
) -> None:
    problems = [
        _long(world, ring, ulysses, rotate, dtype=dtype, mask=mask, through="out")
        for dtype in (torch.float32, torch.float64)
        for mask in ("none", "keys")
    ]
    assert run_ranks(world, _through_autocast, problems) == [[]] * world


def _float64_with_narrow_merge(rank: int, world: int, problem: Problem) -> dict[str, float]:
    given = whole(problem)
    return errors(solve(problem, given, rank), part_of(expect(problem, given), problem, rank))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_float64_is_never_narrowed(run_ranks: RankPool, mode: tuple[int, int, int, str]) -> None:
    for found in run_ranks(mode[0], _float64_with_narrow_merge, _long(*mode, mask="keys", wide=False)):
        assert max(found.values()) < 1e-10, found


def _without_grad(rank: int, world: int, problem: Problem) -> list[bool]:
    """Whether results require gradients or are of inference mode, as they should, and have equal values."""
    given, (queries, keys) = whole(problem), cut(problem, rank)
    inputs = [given.q[:, queries].clone(), given.k[:, keys].clone(), given.v[:, keys].clone()]
    arguments = {"parallel_config": problem.config, "enable_gqa": True, "return_lse": True}
    for x in inputs:
        x.requires_grad_()
    expected = context_parallel_attention(*inputs, **arguments)  # type: ignore[call-overload]
    found = [x.requires_grad for x in expected]
    with torch.no_grad():
        for mine, right in zip(context_parallel_attention(*inputs, **arguments), expected):  # type: ignore[call-overload]
            found += [not mine.requires_grad, torch.equal(mine, right)]
    with torch.inference_mode():
        inside = [x.detach().clone() for x in inputs]
        for mine, right in zip(context_parallel_attention(*inside, **arguments), expected):  # type: ignore[call-overload]
            found += [mine.is_inference(), torch.equal(mine, right)]
    return found


@pytest.mark.parametrize(("world", "ring", "ulysses", "rotate"), MODES[:3])
def test_no_grad_and_inference_mode_give_the_same_results(
    run_ranks: RankPool, world: int, ring: int, ulysses: int, rotate: str
) -> None:
    for found in run_ranks(world, _without_grad, _long(world, ring, ulysses, rotate, dtype=torch.float32)):
        assert found == [True] * 10
