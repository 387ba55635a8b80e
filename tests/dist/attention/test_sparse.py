"""Sparse masks across ranks: exact in every mode and shape, and only the needed keys are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, cycle, pairwise, product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lightning_cp import ContextParallelConfig, SparseMask, context_parallel_attention
from lightning_cp.attention.keys import Ring
from lightning_cp.comm.stats import STATS
from tests.harness import RankPool

BATCH, SIZE, BLOCK = 2, 5, 4
TABLE = torch.rand(1, 1, 99, 99, generator=torch.Generator().manual_seed(1)) < 0.4


def _distance(limit: Callable[[Tensor, Tensor, Tensor], Any]) -> Callable[..., Tensor]:
    return lambda b, h, q, k: (q - k).abs() <= limit(b, h, q)


MODS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "frames": lambda b, h, q, k: q // 6 >= k // 6,
    "window": _distance(lambda b, h, q: 3),
    "radial": lambda b, h, q, k: (q - k).abs() % (1 + (q // 6 - k // 6).abs()) == 0,
    "heads and samples": _distance(lambda b, h, q: 2 + 3 * h + b),
    "rows without keys": lambda b, h, q, k: (q % 3 > 0) & (k > 5) & (k < 17),
    "documents": lambda b, h, q, k: q // 9 == k // 9,
}
KINDS = (*MODS, "blocks")


@dataclass(frozen=True)
class Case:
    """Attention over a sparse mask.

    Attributes:
        kind: of mask, see `KINDS`.
        shuffled: ranks hold the tokens in another order than the mask's.
        known: lengths are given; False: exchanged.
        rotates: chunks of keys go around the ring; False: the needed keys are sent.
        grid: rows and columns; None: a ring.
    """

    ring: int
    ulysses: int
    kind: str
    lengths: tuple[int, ...]
    heads: tuple[int, int]
    shuffled: bool
    known: bool
    rotates: bool
    grid: tuple[int, int] | None = None

    @property
    def config(self) -> ContextParallelConfig:
        rotate: Any = "alltoall" if self.rotates else "grid" if self.grid else "allgather"
        return ContextParallelConfig(self.ring, self.ulysses, rotate_method=rotate, grid=self.grid)

    def mask(self) -> SparseMask:
        """The mask of the whole sequence, in the order of the shards."""
        tokens, heads = sum(self.lengths), self.heads[0]
        if self.kind == "blocks":
            n = -(-tokens // BLOCK)
            counts = TABLE[..., :n, :n].sum(-1).int()
            indices = TABLE[..., :n, :n].int().argsort(dim=-1, descending=True, stable=True).int()
            table = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=BLOCK, seq_lengths=(tokens, tokens))
            mask = SparseMask.from_block_mask(table)
        elif self.kind == "documents":
            mask = SparseMask.from_documents(torch.arange(tokens) // 9, block_size=BLOCK)
        else:
            each = (BATCH, heads) if self.kind == "heads and samples" else (1, 1)
            mask = SparseMask.from_mask_mod(MODS[self.kind], tokens, batch=each[0], heads=each[1], block_size=BLOCK)
        return mask.in_order(self.order()) if self.shuffled else mask

    def order(self) -> Tensor:
        """Position in the sequence of each place of the ranks' shards."""
        tokens = sum(self.lengths)
        return (
            torch.randperm(tokens, generator=torch.Generator().manual_seed(2))
            if self.shuffled
            else torch.arange(tokens)
        )

    def dense(self) -> Tensor:
        """The whole mask [batch, heads, queries, keys] in the order of the sequence."""
        tokens = sum(self.lengths)
        q, k = torch.arange(tokens)[:, None], torch.arange(tokens)
        if self.kind == "blocks":
            return TABLE[0, 0][q // BLOCK, k // BLOCK].expand(BATCH, self.heads[0], tokens, tokens)
        b, h = torch.arange(BATCH)[:, None, None, None], torch.arange(self.heads[0])[:, None, None]
        return MODS[self.kind](b, h, q, k).expand(BATCH, self.heads[0], tokens, tokens)


def _lengths(world: int) -> Iterator[tuple[int, ...]]:
    yield (8,) * world
    yield tuple(3 + (i * 7 + 2) % 11 for i in range(world))
    yield (0, *(9 + i for i in range(world - 1)))
    yield (*(0 for _ in range(world - 1)), 21)


def cases(ring: int, ulysses: int, grid: tuple[int, int] | None = None) -> list[Case]:
    """Every mask with every kind of shards and both transports; the other choices take turns."""
    known, heads, shuffled = (
        cycle((True, False)),
        cycle(((4, 4), (8, 2), (6, 6))),
        cycle((False, True, True, False, False)),
    )
    transports = (False, True) if ring > 1 and not grid else (False,)
    return [
        Case(ring, ulysses, kind, sizes, next(heads), next(shuffled), next(known), rotates, grid)
        for kind, sizes, rotates in product(KINDS, _lengths(ring * ulysses), transports)
    ]


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of one process, with `lse` 0 for queries without a key."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse == float("-inf"), 0)
    return torch.einsum("bhqk,bkhd->bqhd", torch.exp(scores - lse.unsqueeze(-1)), v), lse.transpose(1, 2)


def _check(rank: int, world: int, tried: list[Case]) -> list[str]:
    wrong = []
    for case in tried:
        generator = torch.Generator().manual_seed(3)
        tokens, (hq, hk) = sum(case.lengths), case.heads
        q, k, v, g = (
            torch.randn(BATCH, tokens, heads, SIZE, generator=generator, dtype=torch.float64)
            for heads in (hq, hk, hk, hq)
        )
        g_lse = torch.randn(BATCH, tokens, hq, generator=generator, dtype=torch.float64)
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = reference(whole[0], whole[1], whole[2], case.dense())
        grads = torch.autograd.grad((out, lse), whole, (g, g_lse))
        first = sum(case.lengths[:rank])
        own = case.order()[first : first + case.lengths[rank]]
        local = [x[:, own].clone().requires_grad_() for x in (q, k, v)]
        config = case.config
        lengths = list(case.lengths) if case.known else None
        with mock.patch.object(Ring, "gathers", property(lambda ring: ring.rotate_method != "alltoall")):
            found, found_lse = context_parallel_attention(
                *local,
                parallel_config=config,
                q_lengths=lengths,
                kv_lengths=lengths,
                enable_gqa=True,
                block_mask=case.mask(),
                return_lse=True,
            )
            found_lse = found_lse.masked_fill(found_lse == float("-inf"), 0)
            found_grads = torch.autograd.grad((found, found_lse), local, (g[:, own], g_lse[:, own]))
        pairs = zip((found, found_lse, *found_grads), (out, lse, *grads), strict=True)
        errors = [float((x - y[:, own]).detach().abs().max()) if len(own) else 0.0 for x, y in pairs]
        if max(errors) > 1e-12:
            wrong.append(f"rank {rank} {case}: {errors}")
    return wrong


@pytest.mark.parametrize(
    ("world", "ring", "ulysses", "grid"), [(3, 3, 1, None), (3, 1, 3, None), (6, 6, 1, (3, 2)), (4, 2, 2, (1, 2))]
)
@pytest.mark.default(1)
def test_results_and_gradients_equal_those_of_one_process(
    run_ranks: RankPool, world: int, ring: int, ulysses: int, grid: tuple[int, int] | None
) -> None:
    tried = cases(ring, ulysses, grid)
    wrong = [line for lines in run_ranks(world, _check, tried, timeout_s=240) for line in lines]
    assert not wrong, f"{len(wrong)} wrong of {world} x {len(tried)}:\n" + "\n".join(wrong[:10])


def test_one_process_is_exact() -> None:
    assert not _check(0, 1, cases(1, 1))


def _count(rank: int, world: int, tried: list[Case]) -> list[str]:
    """Compare the bytes sent with those of the mask's table."""
    wrong = []
    for case in tried:
        mask, starts = case.mask(), [0, *accumulate(case.lengths)]
        blocks = [(case.order()[a:b] // BLOCK) for a, b in pairwise(starts)]
        some = mask.kinds.bool().flatten(0, 1).any(0)
        columns = case.grid[1] if case.grid else 1
        rows = [torch.cat(blocks[i : i + columns]) for i in range(0, world, columns)]  # in a ring: of each rank
        keys = sum(int(some[rows[to]].any(0)[blocks[rank]].sum()) for to in range(len(rows)) if to != rank // columns)
        config = case.config
        q, k, v = (
            torch.randn(BATCH, case.lengths[rank], heads, SIZE, dtype=torch.float64, requires_grad=True)
            for heads in (case.heads[0], case.heads[1], case.heads[1])
        )
        lengths: dict[str, Any] = {"q_lengths": list(case.lengths), "kv_lengths": list(case.lengths)}
        before = STATS.sent_bytes
        context_parallel_attention(q, k, v, parallel_config=config, enable_gqa=True, block_mask=mask, **lengths)
        sent = STATS.sent_bytes - before
        row = blocks[rank // columns * columns :][:columns]
        of_row = (columns - 1) * len(blocks[rank]) * SIZE * 8  # q to the row, and out and lse of its queries
        of_row += sum(len(x) for i, x in enumerate(row) if i != rank % columns) * SIZE * 8
        lse = sum(len(x) for i, x in enumerate(row) if i != rank % columns) * -(-case.heads[0] * 8 // 16) * 16
        sent -= BATCH * (case.heads[0] * of_row + lse)
        expected = keys * BATCH * 2 * case.heads[1] * SIZE * 8
        if sent != expected:
            wrong.append(f"rank {rank} {case}: {sent} bytes sent, {expected} expected")
    return wrong


@pytest.mark.parametrize(("world", "grid"), [(3, None), (4, (2, 2))])
@pytest.mark.default(1)
def test_only_the_keys_of_blocks_that_are_not_empty_are_sent(
    run_ranks: RankPool, world: int, grid: tuple[int, int] | None
) -> None:
    tried = [x for x in cases(world, 1, grid) if not x.rotates]
    wrong = [line for lines in run_ranks(world, _count, tried) for line in lines]
    assert not wrong, "\n".join(wrong[:10])


def _tangents(rank: int, world: int, tried: list[Case]) -> list[str]:
    wrong = []
    for case in tried:
        generator = torch.Generator().manual_seed(4)
        tokens, (hq, hk) = sum(case.lengths), case.heads
        inputs, changes = (
            tuple(
                torch.randn(BATCH, tokens, heads, SIZE, generator=generator, dtype=torch.float64)
                for heads in (hq, hk, hk)
            )
            for _ in range(2)
        )
        dense, mask = case.dense(), case.mask()
        first = sum(case.lengths[:rank])
        own = case.order()[first : first + case.lengths[rank]]
        config = case.config

        def attend(q: Tensor, k: Tensor, v: Tensor, config: Any = config, mask: Any = mask) -> Tensor:
            return context_parallel_attention(q, k, v, parallel_config=config, enable_gqa=True, block_mask=mask)

        local = tuple(tuple(x[:, own] for x in pair) for pair in (inputs, changes))
        out, tangent = torch.func.jvp(attend, *local)
        expected = torch.func.jvp(lambda q, k, v, dense=dense: reference(q, k, v, dense)[0], inputs, changes)
        errors = [
            float((x - y[:, own]).abs().max()) if len(own) else 0.0
            for x, y in zip((out, tangent), expected, strict=True)
        ]
        if max(errors) > 1e-12:
            wrong.append(f"rank {rank} {case}: {errors}")
    return wrong


@pytest.mark.parametrize(("ring", "ulysses", "grid"), [(3, 1, None), (4, 1, (2, 2))])
@pytest.mark.default(1)
def test_forward_derivatives_equal_those_of_one_process(
    run_ranks: RankPool, ring: int, ulysses: int, grid: tuple[int, int] | None
) -> None:
    tried = [x for x in cases(ring, ulysses, grid) if not x.rotates][::2]
    wrong = [line for lines in run_ranks(ring * ulysses, _tangents, tried) for line in lines]
    assert not wrong, "\n".join(wrong[:10])
