"""The comparison of arguments on a GPU: the host waits for no table, and tables are those of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_cp.engine.peers.samples import Sampler, reading_of, sampled_difference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
NAMES = ("hidden_states", "timestep", "text", "mask", "guidance", "nested")


def _arguments(device: torch.device | str) -> dict[str, Any]:
    """Arguments of a transformer; `nested` has a tensor of the host, a number and one that is not contiguous."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 900, 64, generator=generator).to(device)
    return {
        "hidden_states": hidden.bfloat16(),
        "timestep": torch.full((2,), 500.0, device=device),
        "text": torch.randn(2, 77, 32, generator=generator).to(device),
        "mask": (torch.arange(77) < 50).repeat(2, 1).to(device),
        "guidance": 3.5,
        "nested": {"host": torch.arange(5), "scale": 0.5, "turned": hidden.transpose(1, 2), "mode": "a"},
    }


@contextmanager
def _without_waits() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _table(arguments: dict[str, Any], device: torch.device | str = DEVICE, forward: int = 3) -> Tensor:
    return Sampler(NAMES).table(arguments, forward=forward, device=torch.device(device))[0]


def test_the_host_waits_for_no_table() -> None:
    """Neither with new shapes, of which positions are copied to the GPU, nor in later forwards."""
    arguments = _arguments(DEVICE)
    reading_of.cache_clear()
    with _without_waits():
        first, second = (_table(arguments, forward=forward) for forward in (3, 4))
    assert first.device.type == DEVICE.type
    assert not torch.equal(first, second), "other elements are read in each forward"


def test_tables_of_equal_arguments_are_equal_on_both_devices() -> None:
    """Of tensors on one device: the weights of a tensor depend on the others beside it."""
    for forward in (3, 4, 2**31 + 5):
        given = [_arguments(device) for device in ("cpu", DEVICE)]
        for one in given:
            one["guidance"], one["nested"] = None, one["nested"]["turned"]
        tables = [_table(one, one["mask"].device, forward).cpu() for one in given]
        torch.testing.assert_close(*tables, rtol=1e-6, atol=1e-6)
        assert sampled_difference(torch.stack(tables).numpy(), NAMES) is None


@pytest.mark.parametrize("name", ["hidden_states", "timestep", "text", "mask", "nested"])
def test_a_difference_is_found_on_the_gpu(name: str) -> None:
    first, other = _arguments(DEVICE), _arguments(DEVICE)
    changed = other[name]["turned"] if name == "nested" else other[name]
    changed[-1] = ~changed[-1] if changed.dtype == torch.bool else changed[-1] + 1
    tables = torch.stack([_table(first), _table(other)]).cpu().numpy()
    assert sampled_difference(tables, NAMES) == (1, f"the contents of {name} differ")
