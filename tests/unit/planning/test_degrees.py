"""The choice of degrees: what is fixed, the batch, heads, memory and the device."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_cp.planning.degrees import choose_degrees, device_of, plan_example, planned
from lightning_cp.planning.models import heads_of
from lightning_cp.planning.search import Request
from lightning_cp.strategies.auto_degrees import Example
from tests.models.wan import wan

GPU = ("NVIDIA H100 80GB HBM3", 85_000_000_000)
ONCE = {"sharded": False, "checkpointing": "none"}


@pytest.fixture(scope="module")
def request_of_two() -> Request:
    model = wan().build().float()
    return Request(planned(model, wan().arguments()), 4, device_of(GPU, 4), dtype=torch.float32, batch_size=2)


def test_degrees_that_are_given_are_kept(request_of_two: Request) -> None:
    chosen = choose_degrees(lambda data: request_of_two, 4, {**ONCE, "data": 1, "ring": 4})
    assert (chosen.ring, chosen.ulysses) == (4, 1)
    assert chosen.reason.startswith("ring=4 ulysses=1: 4 ranks; the only one that fits, bound by ")


@pytest.mark.full
def test_degrees_above_the_heads_and_batches_that_cannot_be_divided_are_not_chosen(request_of_two: Request) -> None:
    heads = replace(request_of_two, ranks=8)
    chosen = choose_degrees(lambda data: heads if data == 1 else None, 8, ONCE)
    assert chosen.ring * chosen.ulysses == 8
    assert chosen.ulysses <= 4
    with pytest.raises(ValueError, match="4 ranks: the batch cannot be divided over 4 data ranks; the batch"):
        choose_degrees(lambda data: None, 4, ONCE)
    with pytest.raises(ValueError, match="on 4 ranks with sharded=False, checkpointing=none, data=3"):
        choose_degrees(lambda data: request_of_two, 4, {**ONCE, "data": 3})
    with pytest.raises(ValueError, match=r"ulysses=8 must be at most the number of heads, 4"):
        choose_degrees(lambda data: heads, 8, {**ONCE, "ulysses": 8})


@pytest.mark.full
def test_without_memory_the_missing_gb_and_the_cheapest_change_are_named(request_of_two: Request) -> None:
    settings = {**ONCE, "data": 1, "ring": 1}
    chosen = choose_degrees(lambda data: request_of_two, 4, settings)
    assert chosen.ulysses == 4
    weights = 4 * sum(x.numel() for x in request_of_two.model.build().parameters()) / 1e9
    small = replace(request_of_two, memory_gb=2 + 3 * weights)
    with pytest.raises(
        ValueError,
        match=r"nothing fits: ulysses 4 needs .* GB more than 2.*Try strategy=cp_fsdp, activation_checkpointing=full",
    ):
        choose_degrees(lambda data: small, 4, settings)


def test_heads_are_read_from_any_configuration() -> None:
    model: Any = torch.nn.Identity()
    for config, heads in (({"num_heads": 4}, 4), (SimpleNamespace(num_attention_heads=6), 6), (None, None)):
        model.config = config
        assert planned(model, {}).heads == heads
    assert heads_of({"num_attention_heads": [2, 4], "n_heads": 8}) == 8


def test_a_gpu_is_found_by_the_name_that_cuda_reports() -> None:
    assert device_of(GPU, 8).memory_gb == 85
    assert device_of(("NVIDIA A100-SXM4-40GB", 42_000_000_000), 8).tflops == 312
    assert device_of(("NVIDIA GeForce RTX 4090", 25_000_000_000), 2).node_ranks == 2
    assert device_of(None, 3).kind == "cpu"
    with pytest.raises(ValueError, match="the figures of Tesla T4 are not known, only those of A100"):
        device_of(("Tesla T4", 1), 1)


@pytest.mark.full
def test_an_empty_example_and_degrees_that_do_not_divide_the_ranks_are_refused(request_of_two: Request) -> None:
    arguments = {name: x[:0] for name, x in wan().arguments().items() if isinstance(x, torch.Tensor)}
    with pytest.raises(ValueError, match="at least one sample, got a batch of 0"):
        plan_example(Example(wan().build(), arguments, None, 2, 2, None, False, GPU, None, None))
    with pytest.raises(ValueError, match=r"with sharded=False, checkpointing=none, data=3$"):
        choose_degrees(lambda data: request_of_two, 4, {**ONCE, "data": 3})
