"""On a GPU, the frozen weights of an idle expert are in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_cp.finetune.experts import Experts
from tests.fake_cuda.world import fake_cuda


class Adapted(nn.Module):
    """A frozen matrix that two names share, and a trained one; a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.tied = self.base
        self.adapter = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.base + self.adapter) @ self.tied * self.scale


def devices(module: nn.Module) -> dict[str, str]:
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    return {name: x.device.type for name, x in tensors.items()}


@pytest.mark.full
def test_only_the_expert_that_runs_has_its_frozen_weights_on_the_gpu() -> None:
    experts = Experts({"high": Adapted(), "low": Adapted()})
    host: dict[str, Any] = {name: experts[name].base for name in experts}
    values = {name: x.detach().clone() for name, x in host.items()}
    on_gpu, in_host = {"adapter": "cuda", "scale": "cuda"}, {"base": "cpu", "tied": "cpu"}
    with fake_cuda():
        experts.to("cuda")
        for name in experts:  # set-up: no base is on the GPU
            assert devices(experts[name]) == {**on_gpu, **in_host}
        x = torch.zeros(2, 4, device="cuda")
        for active, idle in (("high", "low"), ("low", "high"), ("low", "high"), ("high", "low")):
            experts.select(active)
            experts(x)
            assert devices(experts[active]) == {**on_gpu, "base": "cuda", "tied": "cuda"}
            assert experts[active].base is experts[active].tied, "tied weights stay tied"
            assert not experts[active].base.requires_grad
            assert devices(experts[idle]) == {**on_gpu, **in_host}
            assert experts[idle].base is host[idle], "it is not copied back"
        experts["low"](x)  # a pipeline calls a transformer itself
        assert devices(experts["low"])["base"] == "cuda"
        assert devices(experts["high"])["base"] == "cpu"
    assert all(torch.equal(x, values[name]) for name, x in host.items())


def test_weights_in_host_memory_are_converted() -> None:
    experts = Experts({"high": Adapted(), "low": Adapted()})
    experts["high"](torch.zeros(2, 4))
    experts.to(torch.bfloat16)
    assert {x.dtype for x in experts.parameters()} == {torch.bfloat16}
    with fake_cuda():
        experts.to(device="cuda", dtype=torch.float16)
        assert {(x.device.type, x.dtype) for x in experts.buffers()} == {("cuda", torch.float16)}
    assert {(x.device.type, x.dtype) for x in (experts["high"].base, experts["low"].tied)} == {("cpu", torch.float16)}
