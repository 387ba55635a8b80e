"""Prodigy on a GPU: its steps are those of the CPU, and each makes the host wait once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from lightning_cp.training.prodigy import Prodigy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
SHAPES = ((64, 33), (7,), (2, 3, 5))


def _weights(device: torch.device | str, dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def _set_gradients(weights: list[nn.Parameter], step: int) -> None:
    """Gradients of a weight and of noise, the same on all devices."""
    generator = torch.Generator().manual_seed(1 + step)
    for x in weights:
        noise = torch.randn(x.shape, generator=generator).to(x)
        x.grad = (x.detach() + 0.1 * noise).clone()


def _flat(weights: list[nn.Parameter]) -> Tensor:
    return torch.cat([x.detach().cpu().flatten() for x in weights])


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-3)], ids=str)
def test_steps_are_those_of_the_cpu(dtype: torch.dtype, limit: float, corrected: bool) -> None:
    estimates, changes = [], []
    for device in ("cpu", DEVICE):
        weights = _weights(device, dtype)
        optimizer = Prodigy(weights, weight_decay=0.1, d0=1e-3, use_bias_correction=corrected)
        found = []
        for step in range(8):
            _set_gradients(weights, step)
            optimizer.step()
            found.append(optimizer.param_groups[0]["d"])
        assert all(value.device == x.device for x in weights for value in optimizer.state[x].values())
        estimates.append(found)
        changes.append(_flat(weights) - _flat(_weights(device, dtype)))
    assert estimates[0][-1] > 2e-3
    assert estimates[1] == pytest.approx(estimates[0], rel=limit)
    assert (changes[1] - changes[0]).norm() < limit * changes[0].norm()


def test_a_step_waits_once_for_the_device() -> None:
    weights = _weights(DEVICE, torch.float32)
    optimizer = Prodigy(weights)
    _set_gradients(weights, 0)
    optimizer.step()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    texts = [str(warning.message) for warning in recorded]
    assert sum("synchroniz" in text and "prototype" not in text for text in texts) == 1, texts
