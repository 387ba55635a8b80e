"""The two operators fulfil the requirements of PyTorch's compiler and autograd."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import opcheck
from torch.testing import assert_close

from lightning_cp.attention import attend_across, context_parallel_attention
from lightning_cp.attention.call import Settings, settings_of
from lightning_cp.attention.operator import attention, attention_backward
from lightning_cp.config import ContextParallelConfig
from lightning_cp.mesh import groups
from lightning_cp.mesh.groups import groups_for
from tests.dist.problems import Problem, cut, laid_out, local_mask, whole
from tests.harness import RankPool
from tests.reference import max_error


def _inputs(problem: Problem, rank: int) -> tuple[list[Tensor], Tensor | None]:
    given, (queries, keys) = whole(problem), cut(problem, rank)
    parts = (given.q[:, queries], given.k[:, keys], given.v[:, keys])
    mask = local_mask(problem, given.mask, rank)
    if mask is not None and mask.ndim == 2:
        mask = mask[:, None, None]
    return [laid_out(x, problem.layout).detach().requires_grad_() for x in parts], mask


def _opcheck(rank: int, world: int, problem: Problem, tests: list[str]) -> None:
    inputs, mask = _inputs(problem, rank)
    groups = groups_for(problem.config).name
    lengths = (list(problem.q_lengths), list(problem.kv_lengths))
    method = problem.config.rotate_method
    settings = Settings(problem.causal, 0.4, groups, "auto", method, problem.wide, grouped=True)
    arguments = (*inputs, mask, None, *lengths, True, *settings)
    opcheck(attention, arguments, test_utils=tests)
    with torch.no_grad():
        out, lse, *kept, encoded_lengths = attention(*arguments)
    exchanged = problem.ulysses > 1
    q, k, v, m, part_out, part_lse = kept
    saved = [q, k, v, part_out, part_lse] if exchanged else [*(x.detach() for x in inputs), out, lse]
    seen = (m if exchanged else mask) if mask is not None else None
    grads = laid_out(torch.randn_like(out), problem.layout), torch.randn_like(lse)
    opcheck(
        attention_backward,
        (*grads, saved, seen, None, encoded_lengths, list(inputs[1].shape), *settings),
        test_utils=[test for test in tests if test != "test_autograd_registration"],
    )


@pytest.mark.parametrize(
    ("world", "ring", "ulysses", "rotate", "layout"),
    [(3, 3, 1, "allgather", "transposed"), (3, 1, 3, "allgather", "transposed"), (4, 4, 1, "grid 2x2", "contiguous")],
)
@pytest.mark.default("3-1-3")
def test_opcheck_passes(run_ranks: RankPool, world: int, ring: int, ulysses: int, rotate: str, layout: str) -> None:
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"]
    lengths = tuple(2 + i for i in range(world))
    for mask, heads in (("none", (6, 2)), ("keys", (4, 4))):
        more = {"mask": mask, "heads": heads[0], "kv_heads": heads[1], "layout": layout}
        problem = Problem(ring, ulysses, lengths, lengths, rotate, **more)  # type: ignore[arg-type]
        run_ranks(world, _opcheck, problem, tests, timeout_s=120)


def _compiled(rank: int, world: int, problem: Problem, backend: str) -> list[float]:
    """Differences of two independent attentions and something around them, compiled and eager; of gradients, too."""
    config = problem.config
    groups = groups_for(config).name
    lengths = (list(problem.q_lengths), list(problem.kv_lengths))

    def block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        settings = settings_of(q.shape[-1], causal=problem.causal, scale=None, groups=groups, config=config)
        first = attend_across(q * 2, k, v, mask, settings, lengths=lengths)
        strided = q.transpose(1, 2).contiguous().transpose(1, 2)
        second, lse = attend_across(strided, k, v.sin(), mask, settings, lengths=lengths, return_lse=True)
        assert isinstance(first, Tensor)
        return first + second * 3 + torch.where(lse.isinf(), 0, lse).unsqueeze(-1)

    inputs, mask = _inputs(problem, rank)
    expected = block(*inputs, mask)
    weight = torch.linspace(-1, 1, expected.numel()).view(expected.shape)
    expected_grads = torch.autograd.grad((expected * weight).sum(), inputs)
    actual = torch.compile(block, backend=backend, fullgraph=True)(*inputs, mask)
    grads = torch.autograd.grad((actual * weight).sum(), inputs)
    pairs = zip((actual, *grads), (expected, *expected_grads), strict=True)
    return [max_error(mine.detach(), theirs.detach()) for mine, theirs in pairs]


@pytest.mark.parametrize(
    ("world", "ring", "ulysses", "rotate"), [(3, 3, 1, "alltoall"), (3, 1, 3, "allgather"), (4, 4, 1, "grid 2x2")]
)
@pytest.mark.default(1)
def test_a_compiled_function_gives_the_same_numbers(
    run_ranks: RankPool, world: int, ring: int, ulysses: int, rotate: str
) -> None:
    lengths = tuple(2 + i for i in range(world))
    problem = Problem(ring, ulysses, lengths, lengths, rotate, heads=6, kv_heads=2, mask="keys")
    for errors in run_ranks(world, _compiled, problem, "aot_eager", timeout_s=120):
        assert max(errors) < 1e-11


@pytest.mark.full
def test_a_function_compiled_by_inductor_gives_the_same_numbers(run_ranks: RankPool) -> None:
    for mask in ("none", "keys", "rows"):
        problem = Problem(3, 1, (2, 3, 4), (2, 3, 4), heads=6, kv_heads=2, mask=mask)
        for errors in run_ranks(3, _compiled, problem, "inductor", timeout_s=300):
            assert max(errors) < 1e-11


def _checkpointed(rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """Two forwards of different lengths are replayed before one backward: each with its own sizes and masks."""
    from torch.utils.checkpoint import checkpoint

    config = ContextParallelConfig(ring_degree=world)
    groups = groups_for(config).name

    def attend(q: Tensor, mask: Tensor) -> Tensor:
        settings = settings_of(4, causal=False, scale=None, groups=groups, config=config)
        out = attend_across(q, q, q, mask, settings, lengths=([], []))
        assert isinstance(out, Tensor)
        return out

    xs = [torch.randn(1, n + rank, 2, 4, dtype=torch.float64, requires_grad=True) for n in (2, 5)]
    masks = [torch.rand(1, 1, 1, x.shape[1]) > 0.3 for x in xs]
    plain = torch.autograd.grad(sum(attend(x, m).square().sum() for x, m in zip(xs, masks)), xs)
    replayed = sum(checkpoint(attend, x, m, use_reentrant=False).square().sum() for x, m in zip(xs, masks))
    return list(zip(torch.autograd.grad(replayed, xs), plain, strict=True))


def test_checkpointed_forwards_of_different_lengths_replay_each_with_its_own(run_ranks: RankPool) -> None:
    for pairs in run_ranks(3, _checkpointed):
        assert len(pairs) == 2
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def _first_call(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Build the process groups in a compiled function, and compare it with the eager one."""
    lengths, config = [3] * world, ContextParallelConfig(ring_degree=world)
    assert dist.group.WORLD is not None
    groups._cache.of(dist.group.WORLD).pop(config.mesh_shape, None)
    torch._dynamo.reset()

    def attend(x: torch.Tensor) -> torch.Tensor:
        return context_parallel_attention(x * 2, x, x, parallel_config=config, q_lengths=lengths, kv_lengths=lengths)

    x = torch.randn(1, 3, 2, 4)
    return torch.compile(attend, backend="eager")(x), attend(x)


@pytest.mark.full
def test_the_first_call_may_be_compiled(run_ranks: RankPool) -> None:
    for compiled, eager in run_ranks(3, _first_call, timeout_s=120):
        assert_close(compiled, eager)
