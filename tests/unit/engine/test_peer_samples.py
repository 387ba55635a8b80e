"""Differences between the arguments of ranks that sampling detects, and those that it may miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cp.engine.peers.samples import SAMPLES, Sampler, sampled_difference

CPU = torch.device("cpu")
X, NOISE = torch.randn(2, 2, 600, 64, generator=torch.Generator().manual_seed(3))  # a stretch has 18 or 19 elements


def _found(first: Any, other: Any, forward: int = 3) -> str | None:
    tables = [Sampler(["x", "y"]).table({"x": x}, forward=forward, device=CPU)[0] for x in (first, other)]
    found = sampled_difference(torch.stack(tables).numpy(), ["x", "y"])
    return None if found is None else found[1]


def _with(x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    x = x.clone()
    change(x)
    return x


def _row(x: Tensor) -> None:
    x[1, 599].neg_()


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (X, NOISE),
        (X, X.flip(0)),
        (X, _with(X, _row)),
        (X, _with(X, lambda x: x[0, 17, :37].add_(1))),  # twice a stretch, wherever it lies
        (X, _with(X, lambda x: x[..., 5].add_(1))),
        (X, _with(X, lambda x: x.view(-1)[::100].add_(1))),
        (X, _with(X, lambda x: x[1].fill_(torch.nan))),
        (torch.zeros(9), torch.full((9,), torch.nan)),
        (X[0, :30], _with(X[0, :30], lambda x: x[29, 63].add_(1))),  # one of 1920: all are read
        (torch.tensor([1.0, 999.0]), torch.tensor([3.0, 999.0])),
        (torch.tensor([0.5]), torch.tensor([0.502])),
        (torch.arange(4000), _with(torch.arange(4000), lambda x: x[7].add_(1))),
        (torch.arange(2), torch.arange(2).flip(0)),
        (torch.ones(3000, dtype=torch.bool), _with(torch.ones(3000, dtype=torch.bool), lambda x: x[-1:].fill_(False))),
        (torch.zeros(1, 300), _with(torch.zeros(1, 300), lambda x: x[0, 299].fill_(-torch.inf))),
        (X.to(torch.complex64), X.to(torch.complex64) * 1j),
        (X.to(torch.float8_e4m3fn), (-X).to(torch.float8_e4m3fn)),
        ([X, X + 1], [X + 1, X]),
        (0.5, 0.6),
        ({"scale": 1.0, "x": X}, {"scale": 2.0, "x": X}),
        ({"a": X, "b": {"c": torch.tensor([1, 2])}}, {"a": X, "b": {"c": torch.tensor([1, 3])}}),
        ([torch.full((1,), float(i)) for i in range(50)], [torch.full((1,), float(i % 49)) for i in range(50)]),
    ],
)
def test_other_data_is_seen_in_every_forward(first: Any, other: Any) -> None:
    for forward in range(20):
        assert _found(first, other, forward) == "the contents of x differ"
        assert _found(first, first, forward) is None


@pytest.mark.parametrize(
    ("first", "other", "said"),
    [
        (X, X[:, 1:], "the shapes, types or whole numbers of x differ"),
        (X, X.double(), "the shapes, types or whole numbers of x differ"),
        ([X], (X, X), "the shapes, types or whole numbers of x differ"),
        (X, None, "x was given to one of them only"),
        (3, 4, "the shapes, types or whole numbers of x differ"),
        ({"mode": "a"}, {"mode": "b"}, "the shapes, types or whole numbers of x differ"),
        ([X, True], [X, False], "the shapes, types or whole numbers of x differ"),
        (0.5, None, "x was given to one of them only"),
        (X.to_sparse(), X, "the shapes, types or whole numbers of x differ"),
    ],
)
def test_other_shapes_and_types_are_named(first: Any, other: Any, said: str) -> None:
    assert _found(first, other) == said
    assert _found(other, first) == said


@pytest.mark.parametrize(
    ("first", "other"),
    [
        (X, X * (1 + 1e-4 * NOISE)),
        (X.bfloat16(), (X * (1 + 2e-3 * NOISE)).bfloat16()),
        (torch.tensor([0.5]), torch.tensor([0.5001])),
        (_with(X * 1e-9, lambda x: x[0].fill_(1.0)), _with(X * -1e-9, lambda x: x[0].fill_(1.0))),  # noise
        (X, X.transpose(1, 2).contiguous().transpose(1, 2)),  # equal values that lie otherwise
        (X[:1].expand(3, -1, -1), X[:1].repeat(3, 1, 1)),
        (torch.full((9,), torch.nan), torch.full((9,), torch.nan)),
        (torch.full((2, 5000), -torch.inf), torch.full((2, 5000), -torch.inf)),
        (torch.empty(0, 3), torch.empty(0, 3)),
        (torch.empty(4, device="meta"), torch.empty(4, device="meta")),
        (object(), object()),
        (0.5, 0.5001),
        (None, None),
        (torch.nn.Parameter(X), X),
    ],
)
def test_rounding_memory_layout_and_other_objects_are_not_seen(first: Any, other: Any) -> None:
    for forward in range(20):
        assert _found(first, other, forward) is None


def test_a_single_element_is_found_after_some_forwards() -> None:
    other = _with(X, lambda x: x[1, 300, 7].add_(1))
    seen = [_found(X, other, forward) is not None for forward in range(400)]
    share = SAMPLES / X.numel()
    assert 0.5 * share < sum(seen) / len(seen) < 2 * share


def test_random_states_are_unchanged() -> None:
    before = torch.get_rng_state()
    _found(X, X)
    assert torch.equal(torch.get_rng_state(), before)


def test_ranks_with_different_numbers_of_forwards_are_reported() -> None:
    tables = [Sampler(["x"]).table({"x": X}, forward=n, device=CPU)[0] for n in (6, 6, 7)]
    found = sampled_difference(torch.stack(tables).numpy(), ["x"])
    assert found == (2, "one has called the model 7 times and the other 6 times")
