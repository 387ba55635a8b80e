"""Two experts on a GPU: the frozen weights of the idle one are in host memory, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_cp.fabric import ContextParallelStrategy
from tests.dist.finetune.test_experts import trained, tuning
from tests.dist.lightning_ranks import present_rank
from tests.harness import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _train(rank: int, world: int, stay: bool, strategy: str) -> tuple[Any, dict[str, dict[str, str]]]:
    """Train a LoRA of both. Returns: losses and final weights; the device of each weight, by expert.

    Args: stay: move both transformers to the GPU before the set-up, where their frozen weights then stay.
    """
    present_rank(rank, world)
    chosen: Any = ContextParallelStrategy() if strategy == "cp" else "auto"
    fabric = Fabric(accelerator="cuda", devices=1, strategy=chosen)
    fabric.launch()
    tuned = tuning(lora=True)
    experts: Any = tuned.transformer
    for transformer in experts.values() if stay else ():
        nn.Module._apply(transformer, Tensor.cuda)  # .cuda() leaves frozen weights of experts in host memory
    results = trained(tuned, fabric)
    where = {name: {key: x.device.type for key, x in experts[name].named_parameters()} for name in experts}
    losses, ends = results
    return (losses, {name: [x.cpu() for x in values] for name, values in ends.items()}), where


@pytest.mark.parametrize("strategy", ["auto", "cp"])
def test_only_the_active_expert_is_on_the_gpu_and_results_are_equal(run_ranks: RankPool, strategy: str) -> None:
    ((losses, ends), where), ((others, expected), everywhere) = (
        run_ranks(1, _train, stay, strategy, init=False)[0] for stay in (False, True)
    )
    last = losses[-1][0]
    for name, devices in where.items():
        frozen = {device for key, device in devices.items() if ".lora_" not in key}
        assert frozen == {"cuda" if name == last else "cpu"}
        assert {device for key, device in devices.items() if ".lora_" in key} == {"cuda"}
    assert {device for devices in everywhere.values() for device in devices.values()} == {"cuda"}
    assert losses == [(name, pytest.approx(loss, rel=1e-5)) for name, loss in others]
    for name, values in expected.items():
        for found, value in zip(ends[name], values, strict=True):  # sums of a backward on a GPU have no fixed order
            assert (found - value).norm() <= 1e-4 * value.norm(), name
