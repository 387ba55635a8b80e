"""Rollouts over chunks with a sharded cache: outputs and gradients of one process, and the bytes that are sent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_cp import ContextParallelConfig, KeyCache, context_parallel_attention
from lightning_cp.comm.shards import own_shard
from lightning_cp.comm.stats import STATS
from lightning_cp.errors import ShapeError
from lightning_cp.mesh.groups import groups_for
from tests.harness import RankPool
from tests.harness.cases import in_turn
from tests.reference import max_error, softmax_attention

HEADS, D, BATCH = 4, 6, 2


@dataclass(frozen=True)
class Case:
    """A rollout.

    Attributes:
        tokens: of each chunk; some have fewer than there are ranks.
        mask: "", "query" or "block". Both use positions.
        trained: "last": gradients flow through the last chunk; "all": through all chunks; "checkpointed": the last
            chunk is recomputed in backward.
    """

    ring: int = 3
    ulysses: int = 1
    rotate: str = "allgather"
    tokens: tuple[int, ...] = (7, 5, 2, 9, 7, 7, 4, 8)
    window: int | None = 2
    sinks: int = 1
    kv_heads: int = HEADS
    mask: str = ""
    trained: str = "last"
    dtype: torch.dtype = torch.float64
    no_grad: Any = torch.no_grad

    @property
    def config(self) -> ContextParallelConfig:
        return ContextParallelConfig(
            ring_degree=self.ring,
            ulysses_degree=self.ulysses,
            rotate_method=self.rotate,  # type: ignore[arg-type]
        )


def near(q: Tensor, k: Tensor) -> Tensor:
    """Distances below 20, one key in three left out; the first tokens are always seen."""
    return ((q - k).abs() < 20) & (k % 3 != 1) | (k < 2)


def _inputs(case: Case) -> list[list[Tensor]]:
    """Query, key and value of each chunk, all tokens."""
    g = torch.Generator().manual_seed(3)
    heads = (HEADS, case.kv_heads, case.kv_heads)
    return [
        [torch.randn(BATCH, n, h, D, generator=g, dtype=torch.float64).to(case.dtype) for h in heads]
        for n in case.tokens
    ]


def _expected(case: Case) -> tuple[list[Tensor], list[list[Tensor | None]]]:
    """Outputs of each chunk with plain attention over the chunks that it sees, and the gradients of its inputs."""
    chunks = [[x.double().requires_grad_() for x in chunk] for chunk in _inputs(case)]
    starts, outputs, last = [0, *accumulate(case.tokens)], [], len(case.tokens) - 1
    for i, (q, _, _) in enumerate(chunks):
        seen = [n for n in range(i + 1) if n < case.sinks or case.window is None or n > i - case.window]
        constant = case.trained != "all"
        keys, values = (
            torch.cat([chunks[n][x].detach() if constant and n < i else chunks[n][x] for n in seen], 1) for x in (1, 2)
        )
        positions = torch.cat([torch.arange(starts[n], starts[n + 1]) for n in seen])
        mask = near(torch.arange(starts[i], starts[i + 1])[:, None], positions)[None, None] if case.mask else None
        outputs.append(softmax_attention(q, keys, values, mask, causal=False, scale=None)[0])
    loss = sum(_loss(x, n) for n, x in enumerate(outputs) if case.trained == "all" or n == last)
    assert isinstance(loss, Tensor)
    loss.backward()
    return [x.detach() for x in outputs], [[x.grad for x in chunk] for chunk in chunks]


def _loss(out: Tensor, chunk: int) -> Tensor:
    return out.double().square().sum() * (1 + chunk)


def _rollout(case: Case) -> tuple[list[Tensor], list[list[Tensor]], KeyCache, list[int]]:
    """This rank's outputs, its inputs, the cache, and the bytes that it sent in each chunk."""
    groups = groups_for(case.config)
    chunks = [[own_shard(x, 1, groups).requires_grad_() for x in chunk] for chunk in _inputs(case)]
    cache = KeyCache(case.config, window=case.window, sinks=case.sinks, keep_grad=case.trained == "all")
    outputs, sent = [], []
    for i, (q, k, v) in enumerate(chunks):
        before = STATS.sent_bytes

        def step(q: Tensor, k: Tensor, v: Tensor, i: int) -> Tensor:
            cache.append(k, v, chunk=i, tokens=case.tokens[i])
            masks: dict[str, Any] = {}
            if case.mask == "query":
                masks = {"attn_mask": cache.query_mask(near)}
            elif case.mask == "block":
                masks = {"block_mask": cache.block_mask(near, block_size=4)}
            arguments = {**cache.attention_kwargs(), **masks, "enable_gqa": True}
            return context_parallel_attention(q, **arguments)

        is_last = i + 1 == len(chunks)
        if case.trained == "all":
            out = step(q, k, v, i)
        elif is_last and case.trained == "checkpointed":
            out = checkpoint(partial(step, i=i), q, k, v, use_reentrant=False)
        elif is_last:
            out = step(q, k, v, i)
        else:
            with case.no_grad():
                step(q, -k, v, i)  # an earlier denoising step
                before = STATS.sent_bytes
                out = step(q, k, v, i)
        outputs.append(out)
        sent.append(STATS.sent_bytes - before)
    loss = sum(_loss(x, n) for n, x in enumerate(outputs) if x.requires_grad)
    assert isinstance(loss, Tensor)
    loss.backward()
    return outputs, chunks, cache, sent


def _compared(rank: int, world: int, case: Case) -> tuple[float, float]:
    """The largest error of outputs, and of gradients."""
    groups = groups_for(case.config)
    (outputs, chunks, _, _), (expected, gradients) = _rollout(case), _expected(case)
    out = max(max_error(x.detach(), own_shard(y, 1, groups)) for x, y in zip(outputs, expected, strict=True))
    worst = 0.0
    for inputs, found in zip(chunks, gradients, strict=True):
        for x, y in zip(inputs, found, strict=True):
            assert (x.grad is None) == (y is None)
            if x.grad is not None and y is not None:
                worst = max(worst, max_error(x.grad, own_shard(y, 1, groups)))
    return out, worst


MODES: tuple[dict[str, Any], ...] = (
    {"ring": 3, "rotate": "alltoall"},
    {"ring": 1, "ulysses": 3},
    {"ring": 2, "ulysses": 2},
    {"ring": 4, "rotate": "grid"},
)
_CHANGES: tuple[dict[str, Any], ...] = (
    *({"mask": "block"}, {"trained": "all"}, {"mask": "query", "no_grad": torch.inference_mode}),
    *({"trained": "checkpointed", "kv_heads": 2}, {"trained": "all", "window": None, "sinks": 0, "mask": "block"}),
)
CASES = [Case(**mode, **change) for mode, change in in_turn(MODES, _CHANGES)]


@pytest.mark.parametrize("case", [Case(trained="all", mask="query", kv_heads=2), *CASES])
@pytest.mark.default(1)
def test_a_rollout_is_that_of_one_process_and_so_are_its_gradients(run_ranks: RankPool, case: Case) -> None:
    for out, gradient in run_ranks(case.ring * case.ulysses, _compared, case):
        assert out < 1e-12
        assert gradient < 1e-12


def _rounded(rank: int, world: int, case: Case) -> list[float]:
    """Errors of the outputs and gradients, relative to those of a rollout in one process in the same dtype."""
    alone = replace(case, ring=1, ulysses=1, rotate="allgather")
    pairs = zip(_compared(rank, world, case), _compared(rank, world, alone), strict=True)
    return [error / error_alone for error, error_alone in pairs]


@pytest.mark.full
def test_bfloat16_errs_as_in_one_process(run_ranks: RankPool) -> None:
    for ratios in run_ranks(3, _rounded, Case(dtype=torch.bfloat16)):
        assert max(ratios) < 3


def _counted(rank: int, world: int, rotate: str) -> tuple[list[int], int, int]:
    """Bytes sent in each chunk, keys on this rank after the last one, and the bytes of the room."""
    case = Case(rotate=rotate, tokens=(24,) * 8)
    _, _, cache, sent = _rollout(case)
    assert cache._room is not None
    return sent, cache.key.shape[1], cache._room.num_bytes


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.default(1)
def test_only_the_keys_of_the_window_are_sent_and_a_rank_keeps_its_share(run_ranks: RankPool, rotate: str) -> None:
    token = 2 * BATCH * HEADS * D * 8  # bytes of a key and a value
    for sent, keys, room in run_ranks(3, _counted, rotate):
        assert sent == [2 * 8 * min(chunk + 1, 3) * token for chunk in range(8)], "to 2 ranks, 8 keys of each chunk"
        assert keys == 3 * 8, "the sink and two chunks, a third of each"
        assert room == 3 * 8 * token


def _mismatch(rank: int, world: int) -> str:
    cache = KeyCache()  # made without the parallel_config
    x = torch.zeros(1, 4, HEADS, D)
    with pytest.raises(ShapeError) as error:
        cache.append(x, x, chunk=0, tokens=12)
    return str(error.value)


def test_a_cache_of_other_degrees_is_refused_on_every_rank(run_ranks: RankPool) -> None:
    for said in run_ranks(3, _mismatch):
        assert "the 12 tokens of the chunk are divided as [12] over ring=1 x ulysses=1" in said
