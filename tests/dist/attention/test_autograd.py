"""What autograd finds out about attention over several ranks: changes in place, and memory."""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_cp import ContextParallelConfig, context_parallel_attention
from lightning_cp.attention import heads as heads_of_ranks
from lightning_cp.attention.heads import JointHeads
from lightning_cp.comm.transfer import exchange_flat
from lightning_cp.mesh.groups import groups_for
from tests.harness import RankPool
from tests.reference import max_error

CONFIGS = {
    "ring": {"ring_degree": 2},
    "ring, alltoall": {"ring_degree": 2, "rotate_method": "alltoall"},
    "ulysses": {"ulysses_degree": 2},
}


def _inputs(rank: int, *, requires_grad: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(1, 3, 4, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    return [x.requires_grad_(requires_grad) for x in inputs]


def _attend(config: dict[str, object], *inputs: Tensor) -> Tensor:
    return context_parallel_attention(
        *inputs, parallel_config=ContextParallelConfig(**config), q_lengths=[3, 3], kv_lengths=[3, 3]
    )


def _changes(rank: int, world: int, config: dict[str, object]) -> list[float]:
    """Errors of gradients after a change in place; those of a ring cannot be computed."""
    factor = torch.full((), 2.0, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        out = _attend(config, *_inputs(rank, requires_grad=True))
        expected = out.sum()
    out.mul_(factor).sum().backward()  # under no_grad, out is no view of another tensor for autograd
    assert factor.grad is not None
    errors = [max_error(factor.grad, expected)]
    inputs, others = (_inputs(rank, requires_grad=True) for _ in range(2))
    out = _attend(config, *inputs)
    out *= 2
    if "ring_degree" in config:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # backward needs out
            out.sum().backward()
        return errors
    out.sum().backward()
    (2 * _attend(config, *others)).sum().backward()
    for x, y in zip(inputs, others, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        errors.append(max_error(x.grad, y.grad))
    return errors


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_results_may_be_changed_in_place_unless_backward_needs_them(
    run_ranks: RankPool, config: dict[str, object]
) -> None:
    for errors in run_ranks(2, _changes, config):
        assert len(errors) == (1 if "ring_degree" in config else 4)
        assert max(errors) < 1e-12


def _memory(rank: int, world: int, heads: tuple[tuple[int, ...], ...]) -> list[list[bool]]:
    """Whether each tensor is alive in the exchange."""
    groups = groups_for(ContextParallelConfig(ulysses_degree=2))
    assert groups.ulysses is not None
    joint = JointHeads(groups.ulysses, rank, (3, 3), heads)
    tensors = [torch.randn(1, 6, n, 8) for n in heads[rank]]
    alive, seen = [weakref.ref(x) for x in tensors], []

    def exchange(*args: object, **kwargs: object) -> object:
        seen.append([x() is not None for x in alive])
        return exchange_flat(*args, **kwargs)  # type: ignore[arg-type]

    with mock.patch.object(heads_of_ranks, "exchange_flat", exchange):
        joint.to_tokens(tensors)
    return seen


@pytest.mark.parametrize("heads", [((2, 2, 2), (2, 2, 2)), ((3, 3, 3), (1, 1, 1))], ids=["even", "uneven"])
def test_gradients_are_freed_before_ulysses_exchanges_their_copies(
    run_ranks: RankPool, heads: tuple[tuple[int, ...], ...]
) -> None:
    assert run_ranks(2, _memory, heads) == [[[False] * 3]] * 2
