"""Bytes that attention sends and keeps, and when: counted, against the docstring of `context_parallel_attention`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cp.attention import call, context_parallel_attention, gathered, grid, heads, keys, ulysses
from lightning_cp.comm import packet
from lightning_cp.comm import ring_exchange as rotation
from lightning_cp.comm.transfer import Pending
from tests.dist.problems import Problem, cut, local_mask, whole
from tests.harness import RankPool

B, S, H, G, D = 2, 4, 12, 6, 8  # every piece is a multiple of 16 bytes
MODES = [(3, 3, 1), (3, 1, 3), (6, 3, 2)]
ROTATED = [
    (3, 3, 1, "allgather"),
    (3, 3, 1, "alltoall"),
    (3, 1, 3, "allgather"),
    (6, 6, 1, "grid 3x2"),
    (6, 3, 2, "alltoall"),
    (6, 2, 3, "allgather"),
    (6, 6, 1, "grid 2x3"),
    (4, 2, 2, "grid 1x2"),
]


@dataclass
class Traffic:
    """Messages that one rank sent to others. On a grid, the ring is the column."""

    row_exchanges: int = 0
    row_bytes: int = 0
    ring_exchanges: int = 0
    ring_bytes: int = 0
    ulysses_exchanges: int = 0
    ulysses_bytes: int = 0
    size_exchanges: int = 0
    log: list[str] = field(default_factory=list)


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count inside the context; `log` gets "send", "wait", "attend" and "grads" in order."""
    traffic = Traffic()
    patched: list[tuple[Any, str, Any]] = []

    def patch(module: Any, name: str, before: Any) -> None:
        original = getattr(module, name)
        patched.append((module, name, original))

        def wrapper(*args: Any, **more: Any) -> Any:
            before(*args, **more)
            return original(*args, **more)

        setattr(module, name, wrapper)

    def note(axis: str, sent_bytes: int, *words: str) -> None:
        setattr(traffic, f"{axis}_exchanges", getattr(traffic, f"{axis}_exchanges") + 1)
        setattr(traffic, f"{axis}_bytes", getattr(traffic, f"{axis}_bytes") + sent_bytes)
        traffic.log.extend(words)

    def of_sends(axis: str, *words: str) -> Any:
        return lambda sends, receives, *, group: note(axis, sum(buffer.nbytes for _, buffer in sends), *words)

    def of_gather(axis: str, *words: str) -> Any:
        return lambda mine, received, sizes, *, group: note(axis, mine.nbytes * (group.size() - 1), *words)

    def of_exchange(axis: str, *words: str) -> Any:
        return lambda sent, received, sizes, *, group: note(axis, _to_others(sent, sizes, group), *words)

    def sizes(*_: Any, **__: Any) -> None:
        traffic.size_exchanges += 1

    patch(rotation, "exchange", of_sends("ring", "send"))
    patch(packet, "gather_flat", of_gather("ring", "send"))
    patch(gathered, "gather_flat", of_gather("ring", "send"))
    patch(gathered, "exchange_flat", of_exchange("ring", "send"))
    patch(grid, "gather_flat", of_gather("row", "queries"))
    patch(grid, "exchange_flat", of_exchange("row", "results"))
    patch(ulysses, "exchange", of_sends("ulysses"))
    patch(heads, "exchange_flat", of_exchange("ulysses"))
    patch(call, "all_gather_ints", sizes)
    patch(Pending, "wait", lambda *_: traffic.log.append("wait"))
    patch(keys, "attend", lambda *_, **__: traffic.log.append("attend"))
    patch(keys, "attend_backward", lambda *_, **__: traffic.log.append("grads"))
    try:
        yield traffic
    finally:
        for module, name, original in reversed(patched):
            setattr(module, name, original)


def _to_others(sent: Tensor, sizes: tuple[list[int], list[int]] | None, group: dist.ProcessGroup) -> int:
    """Bytes of a flat all-to-all without this rank's own part."""
    return sent.nbytes - (sent.nbytes // group.size() if sizes is None else sizes[0][group.rank()])


def _problem(ring: int, ulysses: int, **more: Any) -> Problem:
    lengths = (S,) * (ring * ulysses)
    settings: dict[str, Any] = {"heads": H, "kv_heads": G, "d": D, "batch": B, "dtype": torch.float32} | more
    return Problem(ring, ulysses, lengths, lengths, **settings)


def _each(rank: int, world: int, problems: list[tuple[Problem, bool]]) -> list[tuple[Traffic, Traffic]]:
    return [_forward_backward(rank, world, *problem) for problem in problems]


def _forward_backward(rank: int, world: int, problem: Problem, with_lse: bool) -> tuple[Traffic, Traffic]:
    given, (queries, keys) = whole(problem), cut(problem, rank)
    q, k, v = given.q[:, queries].clone(), given.k[:, keys].clone(), given.v[:, keys].clone()
    for x in (q, k, v):
        x.requires_grad_()
    lengths = {"q_lengths": problem.q_lengths, "kv_lengths": problem.kv_lengths} if problem.known else {}
    mask = local_mask(problem, given.mask, rank)
    context_parallel_attention(q, k, v, mask, parallel_config=problem.config, enable_gqa=True, **lengths)  # compared
    with counted() as forward:
        out, *lse = (
            context_parallel_attention(  # type: ignore[call-overload]
                q, k, v, mask, parallel_config=problem.config, enable_gqa=True, return_lse=True, **lengths
            )
            if with_lse
            else (
                context_parallel_attention(q, k, v, mask, parallel_config=problem.config, enable_gqa=True, **lengths),  # type: ignore[call-overload]
            )
        )
    with counted() as backward:
        sum(x.sum() for x in (out, *lse)).backward()
    return forward, backward


def _expected(problem: Problem, with_lse: bool, mask_bytes: int = 0) -> tuple[Traffic, Traffic]:
    """The docstring's formula."""
    r, u, e = problem.ring, problem.ulysses, problem.dtype.itemsize
    wide = 4 if problem.wide and e < 4 else e
    b, s, h, g, d = problem.batch, S, problem.heads, problem.kv_heads, problem.d
    kv = 2 * b * (u * s) * (g // u) * d  # elements of K and V in a ring's chunk
    travelling = kv * e + mask_bytes * u
    ring, columns = problem.config.grid_shape
    forward, backward = Traffic(), Traffic()
    if problem.rotate == "alltoall":
        forward.ring_exchanges, backward.ring_exchanges = r - 1, 2 * (r - 1)
    else:  # so little is one slice of heads
        of_mask = bool(mask_bytes) * (ring > 1)
        forward.ring_exchanges, backward.ring_exchanges = (ring > 1) + of_mask, 2 * (ring > 1) + of_mask
    forward.ring_bytes = (ring - 1) * travelling
    backward.ring_bytes = (ring - 1) * (travelling + kv * wide)
    if columns > 1:
        tokens = b * u * s
        queries, numbers = tokens * (h // u) * d * e, tokens * -(-(h // u) * max(e, 4) // 16) * 16
        forward.row_exchanges = backward.row_exchanges = 2
        forward.row_bytes = (columns - 1) * (2 * queries + numbers)
        backward.row_bytes = (columns - 1) * (3 * queries + (3 if with_lse else 2) * numbers)
    if u > 1:
        lse = b * s * h * max(e, 4) if with_lse else 0
        exchanged = (b * s * (2 * h + 2 * g) * d * e + lse) * (u - 1) // u
        forward.ulysses_exchanges = backward.ulysses_exchanges = 2
        forward.ulysses_bytes = exchanged + mask_bytes * (u - 1)
        backward.ulysses_bytes = exchanged
    return forward, backward


def _same(actual: Traffic, expected: Traffic) -> bool:
    return replace(actual, log=[]) == expected


@pytest.mark.parametrize(("world", "ring", "ulysses", "rotate"), ROTATED)
@pytest.mark.default(5)
def test_exchanges_and_bytes_follow_the_formula(
    run_ranks: RankPool, world: int, ring: int, ulysses: int, rotate: str
) -> None:
    """A mask of keys travels with K and V: float32 [b, 4] has 16 bytes a sample."""
    problems = [
        (_problem(ring, ulysses, rotate=rotate, dtype=dtype, wide=wide, mask=mask), with_lse)
        for dtype, wide, with_lse, mask in (
            (torch.float32, True, False, "none"),
            (torch.float32, True, False, "keys added"),
            (torch.float64, True, True, "none"),
            (torch.bfloat16, True, False, "none"),
            (torch.bfloat16, False, True, "none"),
        )
    ]
    for rank, actual in enumerate(run_ranks(world, _each, problems)):
        for (problem, with_lse), found in zip(problems, actual, strict=True):
            expected = _expected(problem, with_lse, mask_bytes=B * S * 4 * (problem.mask != "none"))
            for which, mine, formula in zip(("forward", "backward"), found, expected, strict=True):
                assert _same(mine, formula), f"rank {rank} {which}: {problem}: {mine} instead of {formula}"


@pytest.mark.parametrize(("world", "ring", "ulysses"), MODES)
def test_a_mask_of_rows_is_sent_to_no_one_around_the_ring(
    run_ranks: RankPool, world: int, ring: int, ulysses: int
) -> None:
    problem = _problem(ring, ulysses, mask="rows")
    expected = _expected(problem, False)
    for actual in run_ranks(world, _forward_backward, problem, False):
        for mine, formula in zip(actual, expected, strict=True):
            assert (mine.ring_exchanges, mine.ring_bytes) == (formula.ring_exchanges, formula.ring_bytes)
            assert mine.ulysses_exchanges == formula.ulysses_exchanges


@pytest.mark.parametrize("mask", ["rows", "one row heads"])
def test_a_mask_of_rows_is_sent_along_the_row_of_a_grid(run_ranks: RankPool, mask: str) -> None:
    """To each rank of the row: this rank's rows over half of the keys, bool, in forward and in backward."""
    problem = _problem(4, 1, rotate="grid 2x2", mask=mask)
    sent = B * (S if mask == "rows" else H) * 2 * S
    for actual in run_ranks(4, _forward_backward, problem, False):
        for mine, formula in zip(actual, _expected(problem, False), strict=True):
            assert _same(mine, replace(formula, ulysses_exchanges=1, ulysses_bytes=sent)), (mine, formula)


def test_keys_are_on_their_way_before_queries_of_a_row_are_waited_for(run_ranks: RankPool) -> None:
    problem = _problem(6, 1, rotate="grid 3x2", heads=H, kv_heads=H)
    for forward, backward in run_ranks(6, _forward_backward, problem, False):
        assert forward.log[:3] == backward.log[:3] == ["queries", "send", "wait"]


def test_a_key_head_is_sent_to_each_rank_that_uses_it(run_ranks: RankPool) -> None:
    problem = _problem(1, 3, kv_heads=1)
    for forward, backward in run_ranks(3, _forward_backward, problem, False):
        # q and out: two thirds of the heads; k and v: the one head, to two ranks
        expected = B * S * D * 4 * (2 * H * 2 // 3 + 2 * 1 * 2)
        assert forward.ulysses_bytes == backward.ulysses_bytes == expected


@pytest.mark.parametrize(("world", "ring", "ulysses"), MODES[::2])
@pytest.mark.default(1)
def test_sizes_are_exchanged_once_without_lengths_and_never_with_them(
    run_ranks: RankPool, world: int, ring: int, ulysses: int
) -> None:
    for known, mask in ((True, "none"), (True, "keys"), (True, "rows"), (False, "none"), (False, "keys")):
        answers = run_ranks(world, _forward_backward, _problem(ring, ulysses, known=known, mask=mask), False)
        for forward, backward in answers:
            assert forward.size_exchanges == (0 if known else 1), (known, mask)
            assert backward.size_exchanges == 0


def test_degree_one_sends_nothing(run_ranks: RankPool) -> None:
    problem = _problem(1, 1, known=False)
    for traffic in run_ranks(3, _alone, problem):
        assert replace(traffic, log=[]) == Traffic()


def _alone(rank: int, world: int, problem: Problem) -> Traffic:
    with counted() as traffic:
        q, k, v = (x.clone().requires_grad_() for x in (lambda w: (w.q, w.k, w.v))(whole(problem)))
        context_parallel_attention(q, k, v, parallel_config=problem.config, enable_gqa=True).sum().backward()
    return traffic


def _saved(rank: int, world: int, problem: Problem) -> tuple[list[str], int]:
    """Return the names of saved tensors ("other" if not an argument or result), and the bytes of others."""
    given, (queries, keys) = whole(problem), cut(problem, rank)
    q, k, v = (x.clone().requires_grad_() for x in (given.q[:, queries], given.k[:, keys], given.v[:, keys]))
    mask = local_mask(problem, given.mask, rank)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        out, lse = context_parallel_attention(  # type: ignore[call-overload]
            q, k, v, mask, parallel_config=problem.config, enable_gqa=True, return_lse=True
        )
    names = {
        x.data_ptr(): name
        for name, x in {"q": q, "k": k, "v": v, "mask": mask, "out": out, "lse": lse}.items()
        if x is not None
    }
    others = [x for x in kept if x.data_ptr() not in names]
    return sorted(names.get(x.data_ptr(), "other") for x in kept), sum(x.nbytes for x in others)


@pytest.mark.parametrize(("world", "rotate"), [(3, "allgather"), (3, "alltoall"), (4, "grid 2x2")])
def test_a_ring_keeps_only_local_tensors_for_backward(run_ranks: RankPool, world: int, rotate: str) -> None:
    for mask, extra in (("none", []), ("keys", ["mask"]), ("rows", ["mask"])):
        for names, bytes_ in run_ranks(world, _saved, _problem(world, 1, rotate=rotate, mask=mask)):
            assert names == sorted(["q", "k", "v", "out", "lse", "other", *extra])
            assert bytes_ == (1 + 3 * world) * 8  # the agreed lengths, on the host


def test_ulysses_keeps_what_it_exchanged_for_backward(run_ranks: RankPool) -> None:
    """Bytes of the local tensors: q, k, v, out and lse of all tokens and a third of the heads."""
    for names, bytes_ in run_ranks(3, _saved, _problem(1, 3)):
        assert names == ["lse", *["other"] * 6]  # q, k and v in one tensor; two tensors, and lse, are empty
        assert bytes_ == B * S * ((2 * H + 2 * G) * D + H) * 4 + (1 + 3 * 3) * 8
