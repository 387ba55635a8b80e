"""Frozen weights in host memory are no part of DDP, which refuses weights of two kinds of devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp.strategies.ddp import DDPMixin


@pytest.mark.parametrize(("device", "expected"), [("cpu", None), ("cuda", ["given", "0.bias"])])
def test_frozen_weights_in_host_memory_are_left_out(device: str, expected: list[str] | None) -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2))
    module[0].bias.requires_grad_(False)
    if expected is not None:
        module._ddp_params_and_buffers_to_ignore = ["given"]
    strategy: Any = SimpleNamespace(_lightning=SimpleNamespace(root_device=torch.device(device)))
    for _ in range(2):  # a second set-up
        DDPMixin._leave_in_host(strategy, module)
        assert getattr(module, "_ddp_params_and_buffers_to_ignore", None) == expected
