"""No race and no deadlock in attention, halo exchanges and models: all ranks traced in this process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cp import ContextParallelConfig, SparseMask, apply_context_parallel, context_parallel_attention
from lightning_cp.comm.halo import fetch_halo, halo_exchange, sum_over_ranks
from lightning_cp.comm.shards import gather_uneven
from lightning_cp.mesh.groups import groups_for
from lightning_cp.planning.races import check_ranks, trace_all_ranks
from lightning_cp.planning.races.events import Access, Started, Trace, spans_of
from tests.harness.cases import full_unless
from tests.models.flux import flux
from tests.models.wan import wan

TAGS = {"query": 1.0, "key": 2.0, "value": 3.0}
DEGREES = ((2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (1, 4), (2, 2))
LENGTHS = {"even": (4, 4, 4, 4), "uneven": (3, 5, 2, 6), "empty": (4, 0, 5, 3)}
KINDS = ("plain", "causal", "key mask", "query mask", "shared kv heads", "sparse", "known lengths")


def attention(ring: int, ulysses: int, *, rotate: str, lengths: tuple[int, ...], kind: str) -> Callable[[int], object]:
    """Forward and backward of attention over constant tensors: out must be the value, and dK 0."""
    world = ring * ulysses
    lengths = lengths[:world]

    def step(rank: int) -> tuple[Tensor, Tensor]:
        config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, rotate_method=rotate)
        heads = {"query": 12, "key": 12, "value": 12}
        if kind == "shared kv heads":
            heads |= {"key": 3, "value": 3}
        q, k, v = (torch.full((1, lengths[rank], heads[x], 8), TAGS[x], requires_grad=True) for x in TAGS)
        settings: dict[str, Any] = {"parallel_config": config, "is_causal": kind == "causal"}
        if kind == "key mask":
            settings["attn_mask"] = torch.ones(1, lengths[rank], dtype=torch.bool)
        elif kind == "query mask":
            settings["attn_mask"] = torch.ones(1, 1, lengths[rank], sum(lengths), dtype=torch.bool)
        elif kind == "shared kv heads":
            settings["enable_gqa"] = True
        elif kind == "sparse":
            settings["block_mask"] = SparseMask.from_documents(torch.arange(sum(lengths)) // 6, block_size=2)
        elif kind == "known lengths":
            settings |= {"q_lengths": lengths, "kv_lengths": lengths}
        out = context_parallel_attention(q, k, v, **settings)
        out.sum().backward()
        assert k.grad is not None
        return out.detach(), k.grad

    return step


FAST = (
    (3, 1, "alltoall", "plain", "uneven"),
    (3, 1, "allgather", "sparse", "uneven"),
    (1, 3, "allgather", "plain", "even"),
    (2, 2, "alltoall", "key mask", "uneven"),
)


@pytest.mark.parametrize(
    ("ring", "ulysses", "rotate", "kind", "lengths"),
    full_unless(
        lambda *case: case in FAST,
        [(*x, *rest) for x, *rest in product(DEGREES, ("allgather", "alltoall"), KINDS, LENGTHS)],
    ),
)
def test_attention_has_no_race(ring: int, ulysses: int, rotate: str, kind: str, lengths: str) -> None:
    step = attention(ring, ulysses, rotate=rotate, lengths=LENGTHS[lengths], kind=kind)
    traces = trace_all_ranks(step, ring * ulysses, hops=2 * ring + 2, tags=TAGS)
    assert check_ranks(traces) == []
    assert min(_transfers(trace) for trace in traces) >= 2
    for trace in traces:
        out, grad = trace.result  # type: ignore[misc]
        assert torch.allclose(out, torch.full_like(out, TAGS["value"]), atol=1e-4)
        assert torch.allclose(grad, torch.zeros_like(grad), atol=1e-4)


def test_buffers_in_flight_are_read_while_they_are_sent() -> None:
    """The check would find nothing if the recorder saw no operator."""
    traces = trace_all_ranks(attention(3, 1, rotate="alltoall", lengths=(4, 4, 4), kind="plain"), 3)
    for trace in traces:
        assert any(isinstance(x, Access) and "attention" in x.operator and not x.writes for x in trace.events)


@pytest.mark.parametrize("world", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 4))])
def test_other_transfers_have_no_race(world: int) -> None:
    def step(rank: int) -> object:
        groups = groups_for(ContextParallelConfig(ring_degree=world))
        sizes = [3, 5, 4, 6][:world]
        x = torch.full((2, sizes[rank], 2), float(rank), requires_grad=True)
        for reach in (1, 4):  # 4: across several shards
            halo_exchange(x, 1, sizes, reach, groups.name).sum().backward()
        fetch_halo(x.detach(), 1, 2, 1, groups=groups)
        sum_over_ranks(x[:, :3], groups.name).sum().backward()
        whole = gather_uneven(x, 1, groups)
        whole.sum().backward()
        return whole.detach()

    traces = trace_all_ranks(step, world)
    assert check_ranks(traces) == []
    whole = torch.cat([torch.full((2, n, 2), float(rank)) for rank, n in enumerate([3, 5, 4, 6][:world])], 1)
    assert all(torch.equal(trace.result, whole) for trace in traces)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "ring", "ulysses", "rotate"),
    full_unless(
        lambda model, ring, ulysses, rotate: (model, ring, ulysses, rotate) == ("flux", 3, 1, "alltoall"),
        [(model, *x, rotate) for model in ("flux", "wan") for x in DEGREES for rotate in ("allgather", "alltoall")],
    ),
)
def test_model_has_no_race(model: str, ring: int, ulysses: int, rotate: str) -> None:
    tiny = flux() if model == "flux" else wan()

    def step(rank: int) -> None:
        module = tiny.build()
        apply_context_parallel(
            module, ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, rotate_method=rotate)
        )
        for _ in range(2):
            module(**tiny.arguments(), return_dict=False)[0].sum().backward()

    traces = trace_all_ranks(step, ring * ulysses, hops=0)
    assert check_ranks(traces) == []
    assert min(_transfers(trace) for trace in traces) > 10


def test_spans_are_the_bytes_of_a_view() -> None:
    x = torch.zeros(4, 6)
    assert spans_of(x[1:3]) == ((24, 72),)
    assert spans_of(x[:, 1:3]) == ((4, 12), (28, 36), (52, 60), (76, 84))
    assert spans_of(x.t()[0]) == ((0, 4), (24, 28), (48, 52), (72, 76))
    assert spans_of(x[0, 2].expand(5)) == ((8, 12),)


def _transfers(trace: Trace) -> int:
    return sum(isinstance(x, Started) for x in trace.events)
