"""Several gloo ranks that share one GPU: buffers pass through the host, results stay exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_cp.attention import context_parallel_attention
from tests.dist.problems import Problem, cut, expect, local_mask, part_of, whole
from tests.harness import RankPool
from tests.reference import max_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _errors_on_gpu(rank: int, world: int, problems: list[Problem]) -> list[tuple[float, float]]:
    """Largest error of out and gradients, and their largest value, for each problem."""
    found = []
    for problem in problems:
        given, (queries, keys) = whole(problem), cut(problem, rank)
        parts = (given.q[:, queries], given.k[:, keys], given.v[:, keys])
        inputs = [x.cuda().requires_grad_() for x in parts]
        mask = local_mask(problem, given.mask, rank)
        out = context_parallel_attention(
            *inputs,
            None if mask is None else mask.cuda(),
            0.0,
            problem.causal,
            None,
            True,
            parallel_config=problem.config,
        )
        out.backward(given.grad_out[:, queries].cuda())
        expected = part_of(expect(problem, given), problem, rank)
        pairs = [(out, expected.out), *((x.grad, y) for x, y in zip(inputs, expected.grads.values()))]
        worst = max(max_error(mine.detach().cpu(), theirs) for mine, theirs in pairs)  # type: ignore[union-attr, arg-type]
        found.append((worst, max(theirs.abs().max().item() for _, theirs in pairs if theirs is not None)))
    return found


@pytest.mark.parametrize(
    ("world", "ring", "ulysses", "rotate"),
    [
        (3, 3, 1, "allgather"),
        (3, 3, 1, "alltoall"),
        (3, 1, 3, "allgather"),
        (4, 2, 2, "alltoall"),
        (4, 4, 1, "grid 2x2"),
    ],
)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 5e-3), (torch.bfloat16, 5e-2)])
def test_attention_is_right_where_ranks_share_a_gpu(
    run_ranks: RankPool, world: int, ring: int, ulysses: int, rotate: str, dtype: torch.dtype, limit: float
) -> None:
    lengths = tuple(8 + 3 * i for i in range(world))
    base = Problem(ring, ulysses, lengths, lengths, rotate, 6, 2, d=16, dtype=dtype, through="out")
    problems = [
        replace(base, mask=mask, causal=causal) for mask in ("none", "keys", "rows") for causal in (False, True)
    ]
    for rank, found in enumerate(run_ranks(world, _errors_on_gpu, problems, timeout_s=180)):
        for problem, (worst, size) in zip(problems, found, strict=True):
            assert worst < limit * max(size, 1.0), f"rank {rank}: {problem}: {worst}"
