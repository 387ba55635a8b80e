"""Copies from the host to a GPU within a training step, on fake CUDA tensors: the host waits for none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_cp import ContextParallelConfig
from lightning_cp.comm.background import numbers_on
from lightning_cp.engine.peers import comparison as peers
from lightning_cp.engine.peers.samples import Sampler, reading_of
from lightning_cp.families import StoredBatch
from lightning_cp.finetune.families.family import per_channel
from lightning_cp.mesh.groups import groups_for
from lightning_cp.training.noise import sample_dropped, sample_noise, sample_times
from tests.fake_cuda.world import fake_cuda, fake_ranks

STEP, GPU = {"seed": 0, "step": 1}, torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def _ranks() -> Iterator[None]:
    reading_of.cache_clear()
    with fake_ranks():
        yield
    reading_of.cache_clear()  # it holds fake tensors


def sampled() -> Tensor:
    """The table of a background comparison, with tensors on both devices and a number."""
    given = {"x": torch.empty(2, 70_000, device=GPU), "t": torch.ones(3), "scale": 0.5}
    return Sampler(list(given)).table(given, forward=3, device=GPU)[0]


COPIES: dict[str, Callable[[], Tensor]] = {
    "noise": lambda: sample_noise((2, 3), **STEP, device="cuda", dtype=torch.bfloat16),
    "times": lambda: sample_times(2, **STEP, device=GPU),
    "dropped captions": lambda: sample_dropped(2, 0.1, **STEP, device=GPU),
    "a batch": lambda: StoredBatch({"latents": torch.ones(2, 3)}).to(GPU)["latents"],
    "statistics of the latents": lambda: per_channel([1.0, 2.0], torch.empty(1, 2, 4, device=GPU)),
    "numbers": lambda: numbers_on("cuda", [1, 2, 3], torch.int64),
    "samples of arguments": sampled,
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES.keys())
def test_the_host_waits_for_no_copy_to_the_gpu(copy: Callable[[], Tensor]) -> None:
    with fake_cuda() as recorder:
        assert copy().device.type == "cuda"
        assert recorder.waits == []


def test_a_plain_copy_is_a_wait() -> None:
    with fake_cuda() as recorder:
        torch.tensor([1, 2], device="cuda")
        torch.ones(2).to("cuda", non_blocking=True)
        torch.empty(2, device="cuda").cpu()
        torch.empty((), device="cuda").cpu()
        assert recorder.waits == ["aten._to_copy.default"] * 4


@pytest.mark.parametrize("check_peers", ["always", "sampled"])
def test_nothing_is_compared_or_read_while_a_graph_is_captured(check_peers: str) -> None:
    """A comparison that began before is left to the next forward outside of the graph."""
    check = peers.PeerCheck(groups_for(ContextParallelConfig(ring_degree=4)), ["x"], check_peers)
    check._pending = pending = mock.Mock()
    with mock.patch.object(peers, "is_capturing", return_value=True):
        assert not check.compares_in_full
        with fake_cuda() as recorder:
            check.check({"x": torch.empty(3, device="cuda")}, model="model")
            check.start()
    assert check._pending is pending
    assert not pending.mock_calls
    assert check.compares_in_full
    assert recorder.crossings == []
