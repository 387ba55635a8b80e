"""Forward derivatives over several ranks equal those of plain softmax attention in one process, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from lightning_cp import ContextParallelConfig, context_parallel_attention
from lightning_cp.attention import gathered
from lightning_cp.comm.halo import halo_exchange, halo_ranges, sum_over_ranks
from lightning_cp.comm.shards import gather_shards, shard_range, shard_sizes
from lightning_cp.comm.stats import STATS
from lightning_cp.mesh.groups import groups_for
from tests.dist.attention.test_exactness import lengths, problems
from tests.dist.problems import Problem, cut, laid_out, local_mask, whole
from tests.harness import RankPool
from tests.reference import max_error, softmax_attention

_LIMIT = 1e-10
_WAYS = ("torch.func.jvp", "torch.func.jvp under no_grad", "forward_ad", "forward_ad, frozen")


def _problems(ring: int, ulysses: int, rotate: str) -> list[Problem]:
    """Lengths, masks and causal in pairs that differ from world to world; the other choices take turns."""
    return [x for i, x in enumerate(problems(ring, ulysses, rotate)) if (i + ring) % 3 == 0]


def _tangents(p: Problem, inputs: list[Tensor]) -> list[Tensor]:
    """Tangents of the whole inputs; 0 where the problem gives none."""
    generator = torch.Generator().manual_seed(11)
    found = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in inputs]
    return [x if name in p.needs else torch.zeros_like(x) for name, x in zip("qkv", found, strict=True)]


def _expected(p: Problem) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Whole results: out and lse, their tangents, and the gradients of q, k and v through out."""
    given = whole(p)
    inputs = [x.double().requires_grad_() for x in (given.q, given.k, given.v)]
    mask = given.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double().masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)

    def attend(*x: Tensor) -> tuple[Tensor, Tensor]:
        return softmax_attention(*x, mask, causal=p.causal, scale=p.scale)

    values, tangents = torch.func.jvp(attend, tuple(inputs), tuple(x.double() for x in _tangents(p, inputs)))
    grads = torch.autograd.grad((values[0] * given.grad_out).sum(), inputs, allow_unused=True)
    return list(values), list(tangents), [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads)]


def _solve(p: Problem, rank: int, way: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return this rank's shard of the same; without gradients if the method has none."""
    given, (queries, keys) = whole(p), cut(p, rank)
    cuts, names = (queries, keys, keys), [name for name in "qkv" if name in p.needs]
    frozen = "no_grad" in way or "frozen" in way
    inputs = [
        laid_out(x[:, part], p.layout).detach().requires_grad_(not frozen)
        for x, part in zip((given.q, given.k, given.v), cuts, strict=True)
    ]
    known = {"q_lengths": p.q_lengths, "kv_lengths": p.kv_lengths} if p.known else {}
    mask = local_mask(p, given.mask, rank)

    def attend(*changed: Tensor) -> tuple[Tensor, ...]:
        by_name = dict(zip("qkv", inputs, strict=True)) | dict(zip(names, changed, strict=True))
        found = context_parallel_attention(
            *by_name.values(),
            mask,
            is_causal=p.causal,
            scale=p.scale,
            enable_gqa=True,
            parallel_config=p.config,
            return_lse=p.through == "both",
            **known,  # type: ignore[arg-type]
        )
        return found if isinstance(found, tuple) else (found,)

    tangents = [x[:, part] for x, part in zip(_tangents(p, [given.q, given.k, given.v]), cuts, strict=True)]
    moved = [(x, t) for name, x, t in zip("qkv", inputs, tangents, strict=True) if name in p.needs]
    values, changes = _differentiate(attend, moved, way)
    if frozen:
        return values, changes, []
    grads = torch.autograd.grad((values[0] * given.grad_out[:, queries]).sum(), inputs, allow_unused=True)
    return values, changes, [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads)]


def _differentiate(
    attend: Callable[..., tuple[Tensor, ...]], moved: list[tuple[Tensor, Tensor]], way: str
) -> tuple[list[Tensor], list[Tensor]]:
    primals, tangents = zip(*moved, strict=True)
    if way.startswith("torch.func"):
        with torch.set_grad_enabled("no_grad" not in way):
            values, changes = torch.func.jvp(attend, primals, tangents)
        return list(values), list(changes)
    with forward_ad.dual_level():
        duals = attend(*(forward_ad.make_dual(x, t) for x, t in moved))
        pairs = [forward_ad.unpack_dual(x) for x in duals]
    return [x.primal for x in pairs], [torch.zeros(0) if x.tangent is None else x.tangent for x in pairs]


def _check(rank: int, world: int, cases: list[Problem]) -> list[str]:
    wrong, ways = [], cycle(_WAYS)
    for p in cases:
        way, (queries, keys) = next(ways), cut(p, rank)
        values, tangents, grads = _expected(p)
        with mock.patch.dict(gathered.SLICE_BYTES, cpu=p.slice_bytes):
            found = _solve(p, rank, way)
        expected = [x[:, queries] for x in (*values[: len(found[0])], *tangents[: len(found[1])])]
        expected += [x[:, part] for x, part in zip(grads, (queries, keys, keys), strict=True)] if found[2] else []
        actual = [*found[0], *found[1], *found[2]]
        errors = [max_error(a, e) if a.shape == e.shape else torch.inf for a, e in zip(actual, expected, strict=True)]
        if not max(errors) < _LIMIT:
            wrong.append(f"rank {rank}: {way}: {p}: {errors}")
    return wrong


def _assert_exact(run_ranks: RankPool, world: int, cases: list[Problem]) -> None:
    wrong = [line for lines in run_ranks(world, _check, cases, timeout_s=120) for line in lines]
    assert not wrong, f"{len(wrong)} wrong of {world} x {len(cases)}:\n" + "\n".join(wrong[:10])


@pytest.mark.parametrize(
    ("world", "ring", "ulysses", "rotate"),
    [(3, 3, 1, "allgather"), (3, 3, 1, "alltoall"), (3, 1, 3, "allgather"), (4, 4, 1, "grid 2x2")],
)
@pytest.mark.default(1)
def test_tangents_and_the_gradients_after_them_are_exact(
    run_ranks: RankPool, world: int, ring: int, ulysses: int, rotate: str
) -> None:
    _assert_exact(run_ranks, world, _problems(ring, ulysses, rotate))


@pytest.mark.parametrize(
    ("world", "ring", "ulysses", "rotate"), [(3, 3, 1, "allgather"), (4, 4, 1, "grid 2x2"), (3, 1, 3, "allgather")]
)
def test_every_way_of_asking_for_tangents_gives_the_same(
    run_ranks: RankPool, world: int, ring: int, ulysses: int, rotate: str
) -> None:
    base = Problem(ring, ulysses, *lengths("uneven", world), rotate, heads=6, kv_heads=2, mask="keys", causal=True)
    _assert_exact(run_ranks, world, [replace(base, through=x) for x in ("both", "out") for _ in _WAYS])


def _linear(rank: int, world: int) -> list[float]:
    """Errors of tangents of the cubes of a shard, gathered, summed or with a halo, and of gradients through them."""
    errors = []
    groups = groups_for(ContextParallelConfig(ring_degree=world)).name
    for tokens, reach in ((7, 2), (world - 1, 1)):  # the second leaves the last rank without tokens
        sizes, own = list(shard_sizes(tokens, world)), shard_range(tokens, world, rank)
        x, change = (torch.linspace(a, b, 6 * tokens).double().view(2, tokens, 3) for a, b in ((-1, 2), (3, -1)))
        first, last = halo_ranges(sizes, reach)[rank]
        cubes, seen = 3 * x.square() * change, {"gather": slice(None), "halo": slice(first, last)}
        for name, parallel in {
            "gather": lambda y: gather_shards(y, 1, sizes, groups),  # noqa: B023 - called within this pass
            "halo": lambda y: halo_exchange(y, 1, sizes, reach, groups),  # noqa: B023
            "sum": lambda y: sum_over_ranks(y.sum(1), groups),
        }.items():
            shard = x[:, own.start : own.stop].clone().requires_grad_()
            moved = (change[:, own.start : own.stop],)
            found = torch.func.jvp(lambda y: parallel(y.pow(3)), (shard,), moved)[1]  # noqa: B023
            expected = cubes.sum(1) if name == "sum" else cubes[:, seen[name]]
            errors.append(max_error(found, expected))
            found.sum().backward()
            holders = [name != "halo" or a <= token < b for token in own for a, b in halo_ranges(sizes, reach)]
            counts = torch.tensor(holders).view(len(own), world).sum(1)  # ranks that see each token
            second = 6 * (x * change)[:, own.start : own.stop] * counts[:, None]
            assert shard.grad is not None
            errors.append(max_error(shard.grad, second))
    return errors


def test_tangents_pass_through_gathers_sums_and_halos_and_have_gradients(run_ranks: RankPool) -> None:
    for errors in run_ranks(3, _linear):
        assert len(errors) == 2 * 3 * 2
        assert max(errors) < 1e-12


def _traffic(rank: int, world: int, ring: int, ulysses: int, rotate: str) -> tuple[list[int], list[int]]:
    """Exchanges, and bytes sent, of values alone and of values with tangents."""
    config = Problem(ring, ulysses, (), (), rotate).config
    x, sizes = torch.randn(1, 4, 6, 8, dtype=torch.float64), [4] * world

    def attend(q: Tensor) -> object:
        return context_parallel_attention(q, q, q, parallel_config=config, q_lengths=sizes, kv_lengths=sizes)

    counts: list[int] = []
    sent: list[int] = []
    for call in (lambda: attend(x), lambda: torch.func.jvp(attend, (x,), (x,))):
        before = STATS.collectives, STATS.sent_bytes
        call()
        counts.append(STATS.collectives - before[0])
        sent.append(STATS.sent_bytes - before[1])
    return counts, sent


@pytest.mark.parametrize(
    ("world", "ring", "ulysses", "rotate", "factor"),
    [(3, 3, 1, "alltoall", 3), (3, 3, 1, "allgather", 3), (3, 1, 3, "allgather", 2)],
)
def test_tangents_take_one_more_pass(
    run_ranks: RankPool, world: int, ring: int, ulysses: int, rotate: str, factor: int
) -> None:
    """Around the ring: K and V, then both with their tangents. Ulysses: the tangents as the values."""
    for counts, sent in run_ranks(world, _traffic, ring, ulysses, rotate):
        assert counts[1] == 2 * counts[0]
        assert sent[1] == factor * sent[0]
